"""A run in bfloat16 on a processor that is slower in it says so."""

import pytest
import torch

from lit_klrb.cli.main import main
from lit_klrb.models import precision as passes


@pytest.mark.parametrize(
    ("precision", "device", "speed", "said"),
    [
        ("bf16-mixed", "cpu", 0.2, True),
        ("bf16-true", "cpu", 0.2, True),
        ("bf16-mixed", "cpu", 4.0, False),
        ("32-true", "cpu", 0.2, False),
        ("bf16-mixed", "meta", 0.2, False),
    ],
)
def test_only_a_slower_precision_is_named(monkeypatch, precision, device, speed, said):
    monkeypatch.setattr(passes, "bfloat16_speed", lambda: speed)
    line = passes.slow_precision(precision, torch.device(device))
    assert (line is not None) == said
    assert not said or f"{speed:.2f} of the speed" in line


def test_the_speed_is_a_ratio_of_measured_times(monkeypatch):
    monkeypatch.setattr(passes, "_seconds", lambda dtype: {torch.float32: 2.0, torch.bfloat16: 8.0}[dtype])
    assert passes.bfloat16_speed.__wrapped__() == 0.25


def test_check_and_the_start_of_a_run_say_it(chain, monkeypatch, capsys, caplog, tmp_path):
    monkeypatch.setattr(passes, "bfloat16_speed", lambda: 0.2)
    options = ["--trainer.precision", "bf16-mixed"]
    assert main(["check", *chain.commands.argv("fit", "sft", *options)[1:]]) == 0
    assert "0.20 of the speed of float32" in capsys.readouterr().err + caplog.text
    caplog.clear()
    assert chain.run("fit", "sft", *options, run=tmp_path) == 0
    assert "0.20 of the speed of float32" in capsys.readouterr().err + caplog.text
