"""`certify`: which known gradient a loss has."""

import functools
import re
import sys
from pathlib import Path

import certify_losses as losses
import pytest

from lit_klrb.cli.certify import CLAIMS, has_gradient
from lit_klrb.cli.loss_roles import ROLE_OF, ROLES, SYNONYMS, BoundLoss
from lit_klrb.cli.main import main
from lit_klrb.estimators.certificate import certify

VERDICTS = {
    "k1": ("zero", 0),
    "k2": ("kl_own_token", 1),
    "k3": ("reverse_own_token", 1),
    "full": ("kl_own_token", 1),
    "reinforce": ("kl", 1),
    "sequence_k3": ("reverse", 1),
    "teacher_samples": ("reverse", 1),
    "leave_one_out": ("kl", 1),
    "maximised": ("kl", -2),
    "in_float32": ("reverse_own_token", 1),
    "detached": ("zero", 0),
    "jensen_shannon": (None, None),
}


@functools.cache
def certificate(name, **options):
    loss = BoundLoss(name, getattr(losses, name), {}, options)
    return certify(loss, takes_mask=loss.takes_mask, takes_old=loss.takes_old)


def run(capsys, *words):
    code = main(["certify", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_loss_that_ends_the_program_has_no_certificate(capsys):
    line = "error: certify_losses:ends ended the program: it has no certificate\n"
    assert run(capsys, "certify_losses:ends", "--claims", "kl") == (1, "", line)


@pytest.mark.parametrize("name", VERDICTS)
def test_plain_functions_of_known_gradients(name):
    verdict = certificate(name).on_policy
    expected, scale = VERDICTS[name]
    assert verdict.name == expected
    assert verdict.scale == (scale if scale is None else pytest.approx(scale, rel=1e-5))
    fulfilled = {expected, *(["reverse"] if expected == "reverse_own_token" else [])}
    for claim in CLAIMS:
        assert has_gradient(certificate(name), claim) is (claim in fulfilled and (scale or 0) >= 0)


@pytest.mark.parametrize(
    ("name", "normalisation", "has"),
    [("token_mean", "batch", True), ("length_mean", "length", False), ("k2", "sum", True),
     ("without_mask", "batch", True)],
)  # fmt: skip
def test_means_over_tokens_are_told_apart(name, normalisation, has):
    found = certificate(name)
    assert (found.on_policy.name, found.on_policy.normalisation) == ("kl_own_token", normalisation)
    assert found.on_policy.scale == pytest.approx(1)
    assert has_gradient(found, "kl_own_token") is has
    # The table is of the loss as it is
    assert (found.on_policy.levels[2].cosines["kl_own_token"] > 1 - 1e-9) is (normalisation == "sum")


def test_sums_over_the_batch_positions_and_padding_are_told_apart():
    assert certificate("batch_sum").over_batch
    assert certificate("position_mean").over_width
    assert certificate("position_mean").padding == 0
    assert certificate("forgets_the_mask").padding > 0.1
    assert not has_gradient(certificate("forgets_the_mask"), "kl_own_token")
    assert certificate("k2").padding == 0
    assert not certificate("k2").over_batch
    assert not certificate("k2").over_width


def test_a_clamp_shows_at_the_larger_kl():
    verdict = certificate("clamped").on_policy
    assert verdict.name is None
    assert (verdict.nearly, verdict.agrees_at) == ("reverse_own_token", (0,))


@pytest.mark.parametrize(
    ("name", "claim", "fails_with"),
    [
        ("top3", "kl_own_token", "6 tokens, 2 positions"),
        ("short_credit", "kl", "3 tokens, 4 positions"),
        ("clamped_at_20", "kl_own_token", "KL 60"),
    ],
)
def test_a_part_that_is_left_out_shows_where_it_is_large(capsys, name, claim, fails_with):
    code, page, _ = run(capsys, f"certify_losses:{name}", "--claims", claim)
    (line,) = [line for line in page.splitlines() if "only with" in line]
    assert code == 1
    assert line.startswith(f"  {claim} only with 3 tokens, 3 positions, KL 0.01; ")
    assert line.count("positions") == 5
    assert fails_with not in line


def test_the_table_holds_bias_and_cosine():
    """The bias of k2, whose cosine with the gradient of the KL is less than 1 by as much as it says."""
    for level in certificate("k2").on_policy.levels:
        cosine, ratio = level.cosines["kl"], level.norm_ratio
        assert level.bias == pytest.approx((1 + ratio**2 - 2 * ratio * cosine) ** 0.5)
        assert level.bias > 0.01
        assert level.cosines["kl_own_token"] == pytest.approx(1)
    assert all(level.bias < 1e-9 for level in certificate("reinforce").on_policy.levels)
    sizes = [
        (level.tokens, level.positions, round(level.kl, 6)) for level in certificate("k2").on_policy.levels
    ]
    assert sizes == [(3, 3, 0.01), (3, 3, 0.3), (3, 3, 3.0), (6, 2, 0.3), (3, 4, 0.3), (3, 3, 60.0)]


def test_off_policy():
    token, whole, prefix = (certificate(name) for name in ("ratio_k3", "whole_ratio", "prefix_weighted"))
    assert (token.on_policy.name, token.off_policy.name) == ("kl_own_token", "kl_own_token (given prefixes)")
    for corrected in (whole, prefix):
        assert (corrected.on_policy.name, corrected.off_policy.name) == ("kl", "kl")
    assert certificate("k2").off_policy is None


def test_a_group_of_one_may_fail(capsys):
    code, page, _ = run(capsys, "certify_losses:fails_alone", "--claims", "kl")
    assert code == 0
    assert "batches of one completion fail (ValueError: a group has at least two completions)" in page


def test_the_page_and_the_exit_code(capsys):
    code, page, _ = run(capsys, "certify_losses:k2", "--claims", "kl")
    assert code == 1
    assert "gradient: kl_own_token" in page
    assert page.endswith("certify_losses:k2 does NOT have the gradient that it claims: kl\n")
    assert run(capsys, "certify_losses:k2")[0] == 0
    code, page, _ = run(capsys, "certify_losses:maximised", "--claims", "kl")
    assert code == 1
    assert "times -2 with the WRONG SIGN" in page
    assert "is it detached?" in run(capsys, "certify_losses:detached", "--claims", "zero")[1]
    page = run(capsys, "certify_losses:grpo")[1]
    assert "times 0.1" in page
    assert "advantages and rewards are 0" in page
    assert "CHANGES the gradient" in run(capsys, "certify_losses:forgets_the_mask")[1]
    assert "on prefixes of the policy that generated" in run(capsys, "certify_losses:ratio_k3")[1]


def test_parameters_by_name_role_and_value(capsys):
    words = ["certify_losses:scaled", "--argument", "lp=logprobs", "--argument", "ref=ref_logprobs"]
    code, page, _ = run(capsys, *words, "--option", "beta=0.25", "--claims", "kl_own_token")
    assert (code, "times 0.25" in page) == (0, True)
    code, _, error = run(capsys, *words)
    assert code == 2
    assert "the parameter beta is not known; give it --option beta=VALUE" in error


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["certify_losses:unknown"], 2, "the parameter banana is not known"),
        (["no_such_module:f"], 2, "No module named 'no_such_module'"),
        (["certify_losses"], 2, "MODULE:FUNCTION is expected, got certify_losses"),
        (["certify_losses:k2", "--claims", "k2"], 2, "invalid choice: 'k2'"),
        (["certify_losses:k2", "--argument", "mask=banana"], 2, "the role must be one of logits"),
        (["certify_losses:k2", "--option", "beta=1"], 2, "has no parameter beta; it has logprobs"),
        (["certify_losses:k2", "--option", "mask=["], 2, "mask has no plain value: ["),
        (["certify_losses:text"], 2, "must return a scalar, or a tensor of shape"),
        (["certify_losses:of_positions"], 2, "got shape [4]"),
        (["torch:exp"], 2, "torch:exp has no signature: write a function that calls it"),
        (["certify_losses:fails"], 1, "certify_losses:fails failed: KeyError: no entry 'kl'"),
        (["certify_losses:in_place"], 1, "certify_losses:in_place failed: it changes its inputs in place"),
        (["certify_losses:infinite"], 1, "failed: the loss is -inf for completions of"),
    ],
)
def test_what_cannot_be_certified_ends_in_one_line(capsys, words, code, message):
    found, page, error = run(capsys, *words)
    assert (found, page) == (code, "")
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_example_of_the_documentation(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "certify.md").read_text("utf-8")
    script, output = (re.search(f"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "text"))
    command = re.search(r"python -m lit_klrb (certify my_losses.*)", page)[1]
    (tmp_path / "my_losses.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    code, shown, _ = run(capsys, *command.split()[1:])
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert (code, [line.rstrip() for line in plain.splitlines()]) == (1, output.splitlines())


def test_every_name_has_one_role():
    assert set(SYNONYMS) <= set(ROLES)
    assert len(ROLE_OF) == sum(len(names.split()) for names in SYNONYMS.values())
    assert all(re.fullmatch(r"[a-z_]+", name) for name in ROLE_OF)
