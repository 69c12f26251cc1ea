"""The help of commands: short, quick and true."""

import subprocess
import sys

import pytest

from lit_klrb.cli.explain import main as explain
from lit_klrb.cli.help import KEYS
from lit_klrb.cli.main import RUNS, main


@pytest.mark.parametrize("command", RUNS)
def test_the_short_help_fits_a_screen(capsys, command):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: lit-klrb {command} --config FILE")
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 120


def test_the_keys_of_the_short_help_exist():
    from lit_klrb.cli.error_translation import CLASSES
    from lit_klrb.cli.lightning import LitCLI
    from lit_klrb.cli.setting_types import parameters, subclasses
    from lit_klrb.cli.settings_checker import SettingsChecker

    with pytest.MonkeyPatch.context() as patched:
        known = set()

        def stop(self, *args, **kwargs):
            known.update(self.types)
            raise SystemExit

        patched.setattr(SettingsChecker, "check", stop)
        with pytest.raises(SystemExit):
            LitCLI(["fit"])
    for place in ("model", "data"):
        known |= {f"{place}.{name}" for kind in subclasses(CLASSES[place]) for name in parameters(kind).hints}
    assert KEYS.keys() <= known


def test_every_option_is_in_the_long_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help-all"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "--kl.beta" in output
    assert "--trainer.gradient_clip_val" in output


def test_the_short_help_needs_no_torch():
    call = "from lit_klrb.cli.main import main; main(['fit', '--help'])"
    code = f"import sys; {call}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "is_fitted"), [("RaoBlackwellControlVariate", True), ("RaoBlackwell", False)]
)
def test_a_fitted_estimator_says_what_was_measured(capsys, name, is_fitted):
    explain([name])
    assert ("With one completion they are 0" in capsys.readouterr().out) == is_fitted
