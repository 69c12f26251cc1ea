import torch
from single_steps import attached

from lit_klrb.estimators import TiltedRaoBlackwell
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.models import loading
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules import dpo
from lit_klrb.modules.dpo import best_and_worst


def test_pairs_are_the_best_against_the_worst_and_ties_give_none():
    tokens = torch.tensor(
        [[9, 1, 5, 0], [9, 1, 6, 7], [9, 1, 0, 0], [8, 2, 3, 0], [8, 2, 4, 0], [8, 2, 3, 4]]
    )
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
    rollout = Rollout(tokens, torch.cat([torch.ones(6, 2).bool(), mask], 1), mask)
    pairs = best_and_worst(
        [[9, 1], [8, 2]], rollout, torch.tensor([0.5, 2.0, -1.0, 3.0, 3.0, 3.0]), torch.arange(6.0)
    )
    assert pairs == [([9, 1], [6, 7], [0], 1.0, 2.0)]


def test_the_checkpoint_has_token_values_of_the_completions_that_pairs_are_chosen_from(
    chain, tmp_path, monkeypatch
):
    seen = []

    def recorded(prompts, rollout, rewards, ref_logprob):
        seen.append((rollout.completions, rollout.mask, rewards))
        return best_and_worst(prompts, rollout, rewards, ref_logprob)

    monkeypatch.setattr(dpo, "best_and_worst", recorded)
    size = 3
    sampled = ["--model.completions_per_prompt", str(size), "--data.train_size", "96"]
    assert chain.run("fit", "dpo", *sampled, run=tmp_path / "dpo") == 0
    ((tokens, mask, rewards),) = seen
    assert len(tokens) == 96 * size
    parts = list(zip(*(column.split(32 * size) for column in (tokens, mask, rewards)), strict=True))
    path = str(tmp_path / "dpo" / "checkpoints" / "last.ckpt")
    prior = loading.load_token_values("policy_path", path)
    expected = TokenValues.of_completions(parts, size, len(prior))
    assert expected.explained > 0.1
    assert torch.equal(prior, expected.table)


def test_rloo_starts_from_the_token_values_of_its_policy(chain, tmp_path):
    plain = torch.load(chain.checkpoint("dpo"), weights_only=True)
    prior = torch.linspace(-1, 1, len(plain["state_dict"]["policy.transformer.wte.weight"]))
    path = tmp_path / "dpo.ckpt"
    torch.save({**plain, loading.TOKEN_VALUES_KEY: prior}, path)
    module, _ = attached(chain, tmp_path, TiltedRaoBlackwell(), policy_path=str(path))
    state = module.memory.state_dict()["token_values"]
    assert torch.equal(state["prior"], prior.double())
    assert not state["tables"][:, -1].any()
