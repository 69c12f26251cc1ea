"""`certify`: which known gradient a loss has."""

import functools
import json
import re
import sys
from pathlib import Path

import certify_losses as losses
import pytest
import torch

from lit_klrb.cli.certify import CLAIMS, has_gradient
from lit_klrb.cli.gradients import describe
from lit_klrb.cli.loss_roles import ROLE_OF, ROLES, SYNONYMS, TEACHER_K, BoundLoss
from lit_klrb.cli.main import main
from lit_klrb.estimators.certificate import certify
from lit_klrb.estimators.enumerated_loss import KNOWN, LossInputs, worlds

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
    "jensen_shannon": ("jsd_own_token", 0.25),
    "chi_squared": ("chi2_own_token", 1),
}


@functools.cache
def certificate(name, roles=(), **options):
    loss = BoundLoss(name, getattr(losses, name), dict(roles), options)
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
    assert verdict.scale == pytest.approx(scale, rel=1e-5)
    fulfilled = {expected, *(["reverse"] if expected == "reverse_own_token" else [])}
    for claim in CLAIMS:
        assert has_gradient(certificate(name), claim) is (claim in fulfilled and scale >= 0)


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
    # The table is of large batches, in which a mean over the batch's tokens has no bias
    level, small = found.on_policy.levels[1], found.on_policy.small_batch
    assert (level.cosines["kl_own_token"] > 1 - 1e-9) is (normalisation != "length")
    assert (small is not None) is (normalisation == "batch")
    if small is not None:
        assert small.cosines["kl"] < level.cosines["kl"] - 0.01


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
    assert (verdict.unclamped, verdict.agrees_at) == ("reverse_own_token", (0,))
    assert not has_gradient(certificate("clamped"), "reverse")
    assert describe(verdict).startswith("reverse_own_token, where nothing is clamped or left out")


def test_a_sum_of_known_gradients_is_named_by_its_parts():
    verdict = certificate("half_and_half").on_policy
    assert (verdict.name, verdict.unclamped, verdict.normalisation) == (None, None, "batch")
    assert verdict.mixture == pytest.approx({"kl_own_token": 0.3, "reverse_own_token": 0.7})
    assert verdict.scale == pytest.approx(1)
    assert describe(verdict) == "a sum, +0.3 x kl_own_token +0.7 x reverse_own_token"
    other = certificate("squared_jensen_shannon").on_policy
    assert (other.name, other.mixture) == (None, {})
    assert describe(other).startswith("another; nearest to jsd_own_token, with cosines of 0.9")


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
    (line,) = [line for line in page.splitlines() if line.startswith("a part is clamped or left out")]
    assert code == 1
    assert page.startswith(f"gradient: {claim}, where nothing is clamped or left out\n")
    assert line.count("positions") == 1
    assert fails_with in line


def test_the_table_holds_bias_and_cosine():
    """The bias of k2, whose cosine with the gradient of the KL is less than 1 by as much as it says."""
    for level in certificate(
        "scaled", (("lp", "logprobs"), ("ref", "ref_logprobs")), beta=0.04
    ).on_policy.levels:
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
    name, meaning, claim, conclusion = page.splitlines()[:4]
    assert name == "gradient: kl_own_token"
    assert meaning.startswith("  kl_own_token: each token's KL(policy || reference) given its prefix, ")
    assert claim == "the claimed one, kl: NO"
    assert conclusion.startswith(
        "not the gradient of the KL: cosines with it down to 0.999 at 0.01, 0.765 at 0.3, "
    )
    assert run(capsys, "certify_losses:k2")[0] == 0
    code, page, _ = run(capsys, "certify_losses:maximised", "--claims", "kl")
    assert code == 1
    assert "gradient: -2 x kl, with the WRONG SIGN" in page
    assert "is it detached?" in run(capsys, "certify_losses:detached", "--claims", "zero")[1]
    page = run(capsys, "certify_losses:grpo")[1]
    assert "gradient: 0.1 x reverse_own_token" in page
    assert "advantages and rewards are 0" in page
    assert "CHANGES the gradient" in run(capsys, "certify_losses:forgets_the_mask")[1]
    assert "on prefixes of the policy that generated" in run(capsys, "certify_losses:ratio_k3")[1]


def test_parameters_by_name_role_and_value(capsys):
    words = ["certify_losses:scaled", "--argument", "lp=logprobs", "--argument", "ref=ref_logprobs"]
    code, page, _ = run(capsys, *words, "--option", "beta=0.25", "--claims", "kl_own_token")
    assert (code, "0.25 x kl_own_token" in page) == (0, True)
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
    command = re.search(r"lit-klrb (certify my_losses.*)", page)[1]
    (tmp_path / "my_losses.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "76")
    code, shown, _ = run(capsys, *command.split()[1:])
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    *beginning, dots = output.splitlines()
    assert (code, dots) == (1, "...")
    assert [line.rstrip() for line in plain.splitlines()][: len(beginning)] == beginning


def test_a_kl_in_the_reward_is_right():
    for role in ("kl_rewards", "token_kl_rewards"):
        found = certificate("rewarded", (("r", role),))
        assert (found.on_policy.name, found.on_policy.scale) == ("kl", pytest.approx(1))
        # With the ratio of whole completions, but the log ratio of the policy that generated
        assert found.off_policy.name is None


def test_a_loss_over_the_teachers_head():
    """It is named by what it is where the head is the vocabulary, and its value is the one written here."""
    found = certificate("teacher_head")
    assert found.on_policy.unclamped == "reverse_own_token"
    assert [found.on_policy.levels[i].tokens for i in range(6) if i not in found.on_policy.agrees_at] == [6]
    loss = BoundLoss("teacher_head", losses.teacher_head, {}, {})
    assert loss.roles["teacher_topk_ids"] == "topk_ids"
    assert loss.roles["teacher_topk_log_probs"] == "topk_logprobs"
    world = next(world for world in worlds(off_policy=False) if world.policy.logits.shape[1] == 6)
    tokens, mask = world.policy.sequences()
    logits = world.policy.token_logits(tokens).requires_grad_()
    ref_logits = world.reference.token_logits(tokens)
    inputs = LossInputs(logits, ref_logits, logits.detach(), tokens, mask)
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    head = log_q >= log_q.sort(-1).values[..., -TEACHER_K, None]
    expected = torch.where(head & mask[..., None], log_q.exp() * (log_q - log_p), 0).sum() / len(tokens)
    assert loss(inputs).item() == pytest.approx(expected.item())


def test_json_has_what_the_page_has(capsys):
    code, text, _ = run(capsys, "certify_losses:token_mean", "--claims", "kl", "--json")
    found = json.loads(text)
    verdict = certificate("token_mean").on_policy
    assert (code, found["holds"], found["claim"]) == (1, False, "kl")
    assert found["on_policy"]["name"] == "kl_own_token"
    assert found["on_policy"]["description"] == describe(verdict)
    assert [level["bias"] for level in found["on_policy"]["levels"]] == [
        level.bias for level in verdict.levels
    ]
    assert found["on_policy"]["small_batch"]["bias"] == verdict.small_batch.bias
    assert set(found["on_policy"]["levels"][0]["cosines"]) == set(KNOWN)
    assert found["roles"] == {"logprobs": "logprobs", "ref_logprobs": "ref_logprobs", "mask": "mask"}


def test_every_name_has_one_role():
    assert set(SYNONYMS) <= set(ROLES)
    names = [(name, role) for role, names in SYNONYMS.items() for name in {role, *names.split()}]
    assert dict(names).items() <= ROLE_OF.items()
    assert len(dict(names)) == len(names)
    assert all(ROLE_OF[role] == role for role in ROLES)
    assert all(re.fullmatch(r"[a-z_]+", name) for name in ROLE_OF)


def test_the_rounding_of_a_zero_gradient_has_no_direction():
    def k1(logprobs, ref_logprobs, mask):
        return ((logprobs.float() - ref_logprobs.float()) * mask).sum()

    found = certify(BoundLoss("k1", k1, {}, {})).on_policy
    assert found.name == "zero"
    assert {cosine for level in found.levels for cosine in level.cosines.values()} == {None}
