import json
import re
import sys
from functools import cache

import pytest

from lit_klrb.cli import explain
from lit_klrb.cli.main import main as command_line
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import certificate
from lit_klrb.estimators.advice import ADVICE, DEFAULT
from lit_klrb.estimators.enumerated_loss import SIZES
from lit_klrb.estimators.identity import ZERO

CLASSES = explain.estimator_classes()
RIGHT = [name for name, kind in CLASSES.items() if kind.refusal is None and name != "NoKL"]
WRONG = [name for name, kind in CLASSES.items() if kind.refusal is not None]
certify_estimator = cache(certificate.certify_estimator)


@pytest.fixture(scope="module", autouse=True)
def certified_once():
    """For the page, its JSON and the tests, as it takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "certify_estimator", certify_estimator)
        yield


def output_of(capsys, *argv):
    assert explain.main(argv) == 0
    return capsys.readouterr().out


def test_a_pipe_gets_the_advice_and_one_tab_separated_line_per_estimator(capsys):
    advice, table, names = output_of(capsys).split("\n\n")
    assert advice.splitlines()[0] == f"Which to use; the default of fit is {DEFAULT.__name__}:"
    assert [line.split("\t")[1] for line in advice.splitlines()[2:]] == [a.estimator.__name__ for a in ADVICE]
    rows = [line.split("\t") for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(CLASSES)
    assert [row[0] for row in rows if row[2] == "refused"] == WRONG
    assert names.splitlines() == ["Formula, cost, bias and where it is used: lit-klrb explain NAME"]


def test_advice_names_estimators_that_train_and_pages_repeat_it(capsys):
    assert {advice.estimator.__name__ for advice in ADVICE} <= set(RIGHT)
    assert ADVICE[0].estimator is DEFAULT
    assert f"use it for: {ADVICE[0].situation}\n" in output_of(capsys, DEFAULT.__name__)
    assert "use it for" not in output_of(capsys, "K3Loss")


@pytest.mark.parametrize("width", [80, 100, 240])
def test_a_terminal_gets_tables_of_its_width(capsys, monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    text = re.sub("\x1b\\[[0-9;]*m", "", output_of(capsys))
    assert "──" in text
    assert all(name in text for name in CLASSES), "no name is cut"
    assert max(map(len, text.splitlines())) <= width
    assert "\t" not in text


def test_json_holds_what_the_classes_say_and_those_that_train_come_first(capsys):
    assert list(CLASSES) == [*sorted([*RIGHT, "NoKL"]), *sorted(WRONG)]
    table = json.loads(output_of(capsys, "--json"))
    assert [entry["name"] for entry in table] == list(CLASSES)
    for entry, kind in zip(table, CLASSES.values(), strict=True):
        assert entry["refusal"] == kind.refusal
        assert (entry["formula"], entry["cost"]) == (kind().formula, kind().cost)
        about = kind.explanation
        assert (entry["used_by"], entry["caution"]) == (about.used_by, about.caution)
        ending = "biased" if kind.refusal else "unbiased"
        assert entry["optimises"] == f"{about.optimises}; {ending}"


def test_a_vanishing_gradient_has_no_direction(capsys):
    gradient = certify_estimator(CLASSES["K1Loss"]()).gradient
    assert gradient.name == ZERO
    assert {level.cosines["kl"] for level in gradient.levels} == {None}
    assert max(level.norm_ratio for level in gradient.levels) < 1e-12
    assert "in short: not the gradient of the KL: it trains nothing\n" in output_of(capsys, "K1Loss")


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_a_page_concludes_what_the_class_says(capsys, name):
    """Those that train have the KL's gradient with every pair of models, and their mean value is the KL."""
    page = json.loads(output_of(capsys, name, "--json"))
    short = output_of(capsys, name).split("in short: ")[1].splitlines()[0]
    if name in RIGHT:
        assert (page["gradient"]["name"], page["gradient"]["scale"]) == ("kl", pytest.approx(1))
        assert short == "the gradient of the KL, exactly"
    else:
        assert page["gradient"]["name"] != "kl"
        assert short.startswith("not the gradient of the KL: ")
    if name == "CoarsenedTopK":
        assert all(0 < value < kl for value, (*_, kl) in zip(page["mean_values"], SIZES, strict=True))
    elif name not in ("K2Loss", "K1Loss"):
        assert page["mean_values"] == pytest.approx([kl for *_, kl in SIZES], rel=1e-4)


def test_the_worst_pair_is_in_the_conclusion(capsys):
    text = output_of(capsys, "K3Loss")
    levels = certify_estimator(CLASSES["K3Loss"]()).gradient.levels
    at_3, at_third = levels[2], min(levels[1], *levels[3:5], key=lambda level: level.cosines["kl"])
    assert at_third is levels[4], "the pair with four positions"
    assert f"{at_third.cosines['kl']:.3f} at 0.3, {at_3.cosines['kl']:.3f} at 3 nats" in text.split("\n")[2]
    assert f"\t{at_3.cosines['kl']:.3f}\t{at_3.bias:.3f}\t" in text


def test_a_page_says_why_training_is_refused(capsys):
    text = output_of(capsys, "K3Reward")
    assert f"refused for training: {CLASSES['K3Reward'].refusal}" in text
    assert f"used by: {CLASSES['K3Reward'].explanation.used_by}" in text
    assert "a sum, +1 x kl -1 x reverse_own_token\n" in text


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'raoblackwel' \(did you mean RaoBlackwell\?\)"):
        explain.main(["raoblackwel"])
    with pytest.raises(ConfigurationError) as raised:
        explain.main(["zzz"])
    assert "did you mean" not in str(raised.value)
    assert all(name in str(raised.value) for name in CLASSES)
    assert "\n" not in str(raised.value)


OWN = """
from lit_klrb.estimators import ComposedEstimator, Recipe, Term


class OwnToken(ComposedEstimator):
    \"\"\"The log ratio of each token, credited to it alone.\"\"\"

    recipe = Recipe(value="k1", score=(Term("k1", "own"),))


class NoRecipe(ComposedEstimator):
    pass


class WrongRecipe(ComposedEstimator):
    recipe = "k1"


NotAnEstimator = dict
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's module outside the package."""
    (tmp_path / "own_estimators.py").write_text(OWN)
    (tmp_path / "own_mistake.py").write_text(
        "from lit_klrb.estimators import Recipe, Term\nRecipe('k1', (Term('k4', 'own'),))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_estimators", "own_mistake"):
        sys.modules.pop(name, None)


def test_an_estimator_of_ones_own_has_a_page(own_module, capsys):
    text = output_of(capsys, "own_estimators.OwnToken")
    assert text.startswith("own_estimators.OwnToken: The log ratio of each token, credited to it alone.\n")
    assert "computes: c_t = r_t, l_t = 0\n" in text
    assert "cost: the reference's log-probability of the sampled tokens\n" in text
    page = json.loads(output_of(capsys, "own_estimators.OwnToken", "--json"))
    assert page["gradient"]["name"] == "kl_own_token"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_estimators.Missing", "module 'own_estimators' has no attribute 'Missing'"),
        ("own_estimators.NotAnEstimator", "not a subclass of lit_klrb.estimators.KLEstimator"),
        ("own_estimators.NoRecipe", "abstract"),
        ("own_estimators.WrongRecipe", "WrongRecipe.recipe must be a Recipe, got 'k1'"),
        ("own_mistake.Any", "Term.value: must be one of k1, k2, k3, k3_sequence, kl, forward_kl, jsd, value"),
        ("no_such_file.Any", "cannot import no_such_file.Any: No module named 'no_such_file'"),
        ("lit_klrb.estimators.ComposedEstimator", "abstract"),
    ],
)
def test_a_mistake_in_an_estimator_of_ones_own_is_one_line(own_module, path, message, capsys):
    assert command_line(["explain", path]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_it_trains_by_its_import_path(own_module, chain, tmp_path, capsys):
    assert chain.run("fit", "rloo", "--kl.estimator", "own_estimators.OwnToken", run=tmp_path / "run") == 0
    assert "class_path: own_estimators.OwnToken" in (tmp_path / "run" / "config.yaml").read_text()
    capsys.readouterr()
    for wrong in ("own_estimators.WrongRecipe", "own_mistake.Any", "own_estimators.NoRecipe"):
        assert chain.run("fit", "rloo", "--kl.estimator", wrong, run=tmp_path / "other") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert wrong.rpartition(".")[2] in error or "own_mistake" in error
