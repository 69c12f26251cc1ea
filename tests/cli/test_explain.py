import json
import math
import subprocess
import sys

import pytest
import torch

from lit_klrb.cli import explain
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.enumeration import TabularLM, exact_kl

CLASSES = explain.estimator_classes()
RIGHT = [name for name, kind in CLASSES.items() if kind.explanation.refusal is None and name != "NoKL"]
WRONG = [name for name, kind in CLASSES.items() if kind.explanation.refusal is not None]


def output_of(capsys, *argv):
    assert explain.main(argv) == 0
    return capsys.readouterr().out


def test_a_pipe_gets_one_tab_separated_line_per_estimator(capsys):
    header, *lines = output_of(capsys).splitlines()
    assert [line.split("\t")[0] for line in lines] == list(CLASSES)
    for line in lines:
        cells = line.split("\t")
        assert len(cells) == len(header.split("\t"))
        assert cells[-1].startswith("refused: ") == (cells[0] in WRONG)


def test_a_terminal_gets_a_boxed_table(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "240")
    text = output_of(capsys)
    assert "│" in text
    assert "\t" not in text
    assert all(name in text for name in CLASSES)


def test_json_holds_what_the_classes_say(capsys):
    table = json.loads(output_of(capsys, "--json"))
    assert [entry.pop("name") for entry in table] == list(CLASSES)
    assert table == [kind.explanation._asdict() for kind in CLASSES.values()]


@pytest.mark.parametrize("name", RIGHT)
def test_right_estimators_have_the_true_gradient_at_every_level(name):
    for level, measured in zip(explain.KL_LEVELS, explain.measure(CLASSES[name]), strict=True):
        assert measured.kl == pytest.approx(level, rel=1e-9)
        assert measured.mean_value == pytest.approx(level, rel=1e-9)
        assert measured.cosine == pytest.approx(1, abs=1e-9)
        assert measured.norm_ratio == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_estimators_miss_the_true_gradient(name):
    far = explain.measure(CLASSES[name])[-1]
    assert far.cosine is None or far.cosine < 0.99 or abs(far.norm_ratio - 1) > 0.05


def test_a_vanishing_gradient_has_no_direction():
    assert {(m.cosine, m.norm_ratio) for m in explain.measure(CLASSES["K1Loss"])} == {(None, 0.0)}


def test_the_sequence_level_k3_loss_follows_the_reverse_kl():
    generator = torch.Generator().manual_seed(0)
    table, direction = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    low, high = 0.0, 20.0
    reference = TabularLM(table, 4)
    for _ in range(60):
        middle = (low + high) / 2
        leaf = (table + middle * direction).requires_grad_()
        forward = exact_kl(TabularLM(leaf, 4), reference)
        low, high = (middle, high) if forward < explain.KL_LEVELS[-1] else (low, middle)
    (true,) = torch.autograd.grad(forward, leaf)
    (reverse,) = torch.autograd.grad(exact_kl(reference, TabularLM(leaf, 4)), leaf)
    measured = explain.measure(CLASSES["K3LossSequence"])[-1]
    assert measured.cosine == pytest.approx(
        torch.nn.functional.cosine_similarity(true.flatten(), reverse.flatten(), 0).item(), abs=1e-6
    )
    assert measured.norm_ratio == pytest.approx((reverse.norm() / true.norm()).item(), rel=1e-6)


def test_the_page_of_rao_blackwell_has_the_counterexample(capsys):
    text = output_of(capsys, "RaoBlackwell")
    first = 0.5 * math.log(0.5 / 0.3) + 0.5 * math.log(0.5 / 0.7)
    second = math.log(7 / 3)
    assert f"a\t0.500\t{math.log(5 / 3):.3f}\t{first:.3f}" in text
    assert f"bb\t0.500\t{math.log(5 / 3):.3f}\t{first + second:.3f}" in text
    assert f"variance\t\t0.000\t{second**2 / 4:.3f}" in text
    page = json.loads(output_of(capsys, "RaoBlackwell", "--json"))
    assert page["counterexample"]["variances"] == pytest.approx([0, second**2 / 4], abs=1e-12)
    assert "counterexample" not in json.loads(output_of(capsys, "MonteCarlo", "--json"))


def test_a_page_says_why_training_is_refused(capsys):
    text = output_of(capsys, "K3Reward")
    about = CLASSES["K3Reward"].explanation
    assert f"refused for training: {about.refusal}" in text
    assert f"used by: {about.used_by}" in text
    assert len(text.split("ratio of norms\n")[1].splitlines()) == len(explain.KL_LEVELS)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"'raoblackwel'; did you mean RaoBlackwell\?"):
        explain.main(["raoblackwel"])
    with pytest.raises(ConfigurationError) as raised:
        explain.main(["zzz"])
    assert "did you mean" not in str(raised.value)
    assert all(name in str(raised.value) for name in CLASSES)
    assert "\n" not in str(raised.value)


def test_it_starts_without_lightning_or_transformers():
    program = (
        "import sys; from lit_klrb.cli import explain; explain.main([]);"
        "assert not {'lightning', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
