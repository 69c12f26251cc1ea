"""Rewards of the completions so far, as baselines of the tokens that follow."""

import pytest
import torch
from single_steps import attached

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.models.rollout import Rollout


def by_definition(module, rollout, rewards, every):
    """Decodes each prefix by itself; 0 for the empty one, which all completions of a prompt share."""
    rows = []
    width, prompt = rollout.mask.shape[1], rollout.tokens.shape[1] - rollout.mask.shape[1]
    for row, reward in zip(range(len(rewards)), rewards.tolist(), strict=True):
        inside = rollout.attention_mask[row]
        tokens, length = rollout.tokens[row][inside], int(rollout.mask[row].sum())
        start = int(inside[:prompt].sum())
        values = []
        for place in range(width):
            count = max(every * (place // every), min(place, 1))
            text = module.tokenizer.decode(tokens[: start + count], skip_special_tokens=True)
            before = module.reward([text]).item() if count else 0.0
            values.append(reward - before if place < length else 0.0)
        rows.append(values)
    return torch.tensor(rows)


@pytest.mark.parametrize("every", [1, 3, 20])
def test_equals_its_definition(chain, tmp_path, every):
    module, batch = attached(
        chain, tmp_path, RaoBlackwellControlVariate(), prefix_reward_every=every, missing_eos_penalty=0.5
    )
    rollout = module.sample(batch, 0)
    shorter = rollout.cut(5)
    ends = torch.arange(len(rollout.mask))[:, None] % 2 == 0
    rollout = Rollout(
        rollout.tokens, *(torch.where(ends, *pair) for pair in zip(shorter[1:3], rollout[1:3], strict=True))
    )
    assert rollout.mask.sum(1).tolist() == [5, 8] * 6
    rewards = module.training_rewards(rollout, module.pair.rewards(module.reward, rollout, batch))
    found = module.reward_to_come(rollout, batch, rewards)
    torch.testing.assert_close(found, by_definition(module, rollout, rewards, every), rtol=0, atol=1e-6)


def test_a_step_is_weighted_with_them(chain, tmp_path):
    scores, estimator = {}, RaoBlackwellControlVariate(directions=("prefix_rewards",))
    for every in (None, 1):
        module, batch = attached(chain, tmp_path, estimator, prefix_reward_every=every)
        module.training_step(batch, 0)
        experience = module.experience
        scores[every] = experience.weights.score
    stats = module.pair.score(experience.rollout, batch)[1].detach()
    rewards, mask = experience.rewards, experience.rollout.mask
    plain = MonteCarlo().weights(stats, mask, rewards, beta=0.3, group_size=3).score
    torch.testing.assert_close(scores[None], plain)
    stats = stats._replace(reward_to_come=module.reward_to_come(experience.rollout, batch, rewards))
    expected = estimator.weights(stats, mask, rewards, beta=0.3, group_size=3).score
    torch.testing.assert_close(scores[1], expected)
    assert not torch.allclose(expected, plain)


def test_the_reward_is_never_asked_about_an_empty_completion(chain, tmp_path):
    module, batch = attached(chain, tmp_path, RaoBlackwellControlVariate(), prefix_reward_every=2)
    seen, plain = [], module.reward

    def reward(texts, columns):
        seen.extend(columns["completions"])
        return plain(texts, columns)

    module.reward = reward
    module.training_step(batch, 0)
    assert len(seen) == 12 * (1 + 4)  # whole, and of 1, 2, 4 and 6 tokens
    assert all(seen)


def test_an_estimator_that_ignores_them_is_refused(chain, tmp_path):
    for estimator in (RaoBlackwell(), RaoBlackwellControlVariate(directions=("kl",))):
        module, _ = attached(chain, tmp_path, estimator, prefix_reward_every=1)
        with pytest.raises(ConfigurationError, match=r"^model\.init_args\.prefix_reward_every: 1 has"):
            module.setup("fit")
    module, _ = attached(chain, tmp_path, RaoBlackwellControlVariate(), prefix_reward_every=1)
    module.setup("fit")


def test_a_reward_that_cannot_score_an_unfinished_completion_is_one_line(
    chain, tmp_path, monkeypatch, capsys
):
    (tmp_path / "whole_only.py").write_text(
        "def score(completions, **columns):\n"
        "    if max(len(completion.split()) for completion in completions) == 1:\n"
        "        raise ValueError('no verdict')\n"
        "    return [0.0 for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--model.reward_path", "whole_only:score", "--kl.estimator", "RaoBlackwellControlVariate"]
    wrong = [*options, "--model.prefix_reward_every", "1"]
    assert chain.run("fit", "rloo", *wrong, run=tmp_path / "run") == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    said = (
        f"error: model.init_args.reward_path: ValueError: no verdict ({tmp_path / 'whole_only.py'}, line 3); "
    )
    assert (
        line == f"{said}model.init_args.prefix_reward_every asked for the reward of an unfinished completion"
    )
