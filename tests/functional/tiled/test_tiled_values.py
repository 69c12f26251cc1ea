"""Values and gradients of the tiled operations are those of full logits and autograd."""

import math

import pytest
import torch
from tiled_cases import (
    Case,
    assert_close,
    gradients,
    make_case,
    plain_stats,
    present,
    tiled_loss,
    tiled_stats,
    token_values,
    weights_like,
)

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import TopK, clipped_loss, kl_topk, tiled_policy_loss
from lit_klrb.functional.tiled import inputs

READINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "capped": {"logit_softcap": 2.0, "ref_logit_softcap": 3.0, "temperature": 1.5},
    "policy_capped": {"logit_softcap": 1.5},
    "small_tiles": {"tile_size": 4},
    "one_row": {"tile_size": 1},
    "token_values": {"token_values": token_values(make_case()), "tile_size": 4},
    "token_values_capped": {"token_values": token_values(make_case()), "logit_softcap": 1.5},
    "head": {"topk": TopK(1), "temperature": 0.7},
    "reference_head": {"topk": TopK(5, "reference"), "logit_softcap": 2.0, "ref_logit_softcap": 2.0},
    "head_values": {"topk": TopK(9), "token_values": token_values(make_case()), "tile_size": 4},
    "jsd": {"jsd_weight": 0.3, "logit_softcap": 2.0, "tile_size": 4},
    "forward": {"jsd_weight": 1.0, "token_values": token_values(make_case()), "tile_size": 4},
    "whole_head": {"topk": TopK(23), "logit_softcap": 2.0, "tile_size": 4},
}


def plain_options(options: dict) -> dict:
    names = {"logit_softcap": "softcap", "ref_logit_softcap": "ref_softcap"}
    return {names.get(name, name): value for name, value in options.items() if name != "tile_size"}


@pytest.mark.parametrize("retained", [True, False])
def test_two_caps_no_bias_and_a_second_backward_pass(retained, monkeypatch):
    """None of which `test_any_input` has."""
    if not retained:
        monkeypatch.setattr(inputs, "_RETAINED_LOGITS", 0)
    case, options = make_case()._replace(ref_bias=None), READINGS["capped"]
    leaves = (*case.leaves()[:2], None)
    got, expected = tiled_stats(case, leaves, **options), plain_stats(case, leaves, **plain_options(options))
    assert_close(got, expected)
    weights = weights_like(case.tokens)
    losses = [(weights * (stats.kl + stats.logprobs)).sum() for stats in (got, expected)]
    definition = gradients(losses[1], leaves)
    for _ in range(2):  # the second backward pass cannot use retained blocks
        assert_close(torch.autograd.grad(losses[0], leaves[:2], retain_graph=True), definition)


@pytest.mark.parametrize("ratio", ["none", "plain", "clipped"])
@pytest.mark.parametrize("reading", READINGS)
def test_loss_is_the_composition_of_token_stats_and_autograd(reading, ratio):
    case, options = make_case(), dict(READINGS[reading])
    leaves = case.leaves()
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    score_weights, kl_weights = weights_like(case.tokens), weights_like(case.tokens, 2)
    expected = plain_stats(case, leaves, **plain_options(options))
    behaviour = expected.logprobs.detach() + 0.5 * weights_like(case.tokens, 3)
    kl = kl_topk(expected) if "topk" in options else expected.kl
    kl = expected.jsd if "jsd_weight" in options else kl
    score = expected.logprobs
    if ratio != "none":
        options["behaviour_logprobs"] = behaviour
        score = (expected.logprobs - behaviour).exp()
    if ratio == "clipped":
        options["clip_range"] = 0.2
        outside = ((score - 1).abs() > 0.2)[mask]
        assert outside.any()
        assert not outside.all()
        score_loss = clipped_loss((expected.logprobs - behaviour) * mask, score_weights * mask, 0.2) * 3
    else:
        score_loss = (score_weights * score)[mask].sum()
    expected_loss = (score_loss + (kl_weights * kl)[mask].sum()) / 3
    if "token_values" in options:
        options["value_weights"] = weights_like(case.tokens, 4)
        value_loss = (options["value_weights"] * expected.expected_value)[mask].sum() / 3
        expected_loss = expected_loss + value_loss
    loss, stats = tiled_loss(case, leaves, mask, score_weights, kl_weights, **options)
    assert_close([loss], [expected_loss])
    assert_close(stats, expected.masked(mask))
    assert not any(field.requires_grad for field in present(stats))
    assert_close(gradients(loss, leaves), gradients(expected_loss, leaves))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_positions_outside_the_mask_have_no_influence(junk):
    case = make_case()
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    weights = [weights_like(case.tokens, seed) for seed in (1, 2, 3, 4)]
    values = token_values(case)
    results = []
    for spoil in (False, True):
        these, (score_weights, kl_weights, behaviour, value_weights) = case, weights
        if spoil:
            outside = ~mask
            these = case._replace(
                hidden=case.hidden.masked_fill(outside[..., None], junk),
                ref_hidden=case.ref_hidden.masked_fill(outside[..., None], junk),
                tokens=case.tokens.masked_fill(outside, -100),
            )
            score_weights, kl_weights, behaviour, value_weights = (
                w.masked_fill(outside, junk) for w in weights
            )
        leaves = these.leaves()
        loss, stats = tiled_loss(
            these,
            leaves,
            mask,
            score_weights,
            kl_weights,
            behaviour_logprobs=behaviour,
            clip_range=0.2,
            token_values=values,
            value_weights=value_weights,
        )
        general = tiled_stats(these, leaves, mask=mask, token_values=values)
        total = sum(field.sum() for field in present(general))
        results.append(
            [loss, *present(stats), *gradients(loss, leaves), *present(general), *gradients(total, leaves)]
        )
        assert all((field[~mask] == 0).all() for field in present(stats))
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


@pytest.mark.parametrize("tied", ["heads", "states"])
def test_models_may_share_head_or_hidden_states(tied):
    case = make_case()
    leaves = case.leaves()
    if tied == "heads":
        case = case._replace(ref_weight=leaves[1], ref_bias=leaves[2])
    else:
        case = case._replace(ref_hidden=leaves[0])
    constant = Case(*(tensor.detach() for tensor in case))
    got, expected = tiled_stats(case, leaves), plain_stats(constant, leaves)
    weights = weights_like(case.tokens)
    assert_close(got, expected)
    assert_close(
        gradients((weights * got.kl).sum(), leaves), gradients((weights * expected.kl).sum(), leaves)
    )


def test_token_values_and_their_weights_come_together():
    case = make_case()
    weights = weights_like(case.tokens)
    for options in ({"token_values": token_values(case)}, {"value_weights": weights}):
        with pytest.raises(ConfigurationError, match="value_weights: must be given together with"):
            tiled_loss(case, case.leaves(), case.tokens >= 0, weights, weights, **options)
    values = token_values(case)
    for short in (values[:5], values[:22]):
        padded = torch.nn.functional.pad(short, (0, 23 - len(short)))
        found, expected = (tiled_stats(case, case.leaves(), token_values=v) for v in (short, padded))
        assert torch.equal(found.expected_value, expected.expected_value)
    message = r"token_values: must have shape \[23\] or be shorter, got \[24\]"
    with pytest.raises(ConfigurationError, match=message):
        tiled_stats(case, case.leaves(), token_values=torch.cat([values, values[:1]]))


def test_gradients_are_scaled_and_returned_once():
    case = make_case()
    leaves, mask, weights = case.leaves(), case.tokens >= 0, weights_like(case.tokens)
    whole = gradients(tiled_loss(case, leaves, mask, weights, weights)[0], leaves)
    loss, _ = tiled_loss(case, leaves, mask, weights, weights)
    (loss / 4).backward(retain_graph=True)
    assert_close([leaf.grad for leaf in leaves], [gradient / 4 for gradient in whole])
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_backward_refuses_a_head_that_has_changed():
    case = make_case()
    leaves = case.leaves()
    total = tiled_stats(case, leaves).kl.sum()
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: must be positive and finite, got 0.0"),
        ({"tile_size": 0}, "tile_size: must be positive and finite, got 0"),
        ({"logit_softcap": -1.0}, "logit_softcap: must be positive and finite, got -1.0"),
        ({"bias": torch.zeros(5)}, r"bias: must have shape \[23\], got \[5\]"),
        ({"ref_hidden": torch.zeros(3, 4, 4)}, r"ref_hidden: must have shape \[3, 5, 4\], got \[3, 4, 4\]"),
        ({"ref_weight": torch.zeros(22, 4)}, r"ref_weight: must have shape \[23, 4\], got \[22, 4\]"),
        ({"mask": torch.ones(3, 4) > 0}, r"mask: must have shape \[3, 5\], got \[3, 4\]"),
        ({"kl_weights": torch.zeros(5)}, r"kl_weights: must have shape \[3, 5\], got \[5\]"),
        ({"behaviour_logprobs": torch.zeros(5)}, r"behaviour_logprobs: must have shape \[3, 5\], got \[5\]"),
        (
            {"behaviour_logprobs": torch.zeros(3, 5), "clip_range": 0.0},
            "clip_range: must be positive and finite, got",
        ),
        ({"clip_range": 0.2}, "clip_range: must be None without behaviour_logprobs, got 0.2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    case = make_case()
    arguments = case._asdict() | {"mask": case.tokens >= 0}
    arguments |= {"score_weights": torch.zeros(3, 5), "kl_weights": torch.zeros(3, 5)} | change
    with pytest.raises(ConfigurationError, match="^" + message):
        tiled_policy_loss(**arguments)
