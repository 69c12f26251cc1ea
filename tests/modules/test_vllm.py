"""Rollouts with vLLM, tested with a mock of its interface; `make engines` runs the same with vLLM itself."""

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from runs import weights_of
from single_steps import attached
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb.cli.main import main
from lit_klrb.engine.generation import Sampling
from lit_klrb.engine.vllm import VLLMBackend
from lit_klrb.estimators import RaoBlackwell
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.rollout import Rollout


class SamplingParams:
    def __init__(self, **settings):
        self.__dict__ |= settings


class LLM:
    """Samples one request after the other with its own model, of the configuration in the given folder."""

    started: ClassVar[list] = []

    def __init__(self, model, **options):
        self.options, self.loads = options, 0
        assert options["load_format"] == "dummy", "the folder has no weights"
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        if config.architectures != [type(self.model).__name__]:
            raise ValueError(f"Model architectures {config.architectures} are not supported")
        self.known = {}  # probabilities by context: requests repeat their prompts
        self.started.append(self)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))
        self.known.clear()
        self.loads += 1

    def reset_prefix_cache(self):
        pass

    @torch.no_grad()
    def generate(self, requests, settings, use_tqdm):
        return [self._sample(r["prompt_token_ids"], s) for r, s in zip(requests, settings, strict=True)]

    def _sample(self, ids, settings):
        generator, drawn, logprobs = torch.Generator().manual_seed(settings.seed), [], []
        while len(drawn) < settings.max_tokens and drawn[-1:] != settings.stop_token_ids:
            probabilities = self._probabilities((*ids, *drawn), settings.temperature)
            drawn.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            logprobs.append({drawn[-1]: SimpleNamespace(logprob=float(probabilities[drawn[-1]].log()))})
        assert settings.logprobs == 0
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=drawn, logprobs=logprobs)])

    def _probabilities(self, context, temperature):
        if (context, temperature) not in self.known:
            logits = self.model(torch.tensor([context])).logits[0, -1] / temperature
            self.known[context, temperature] = logits.softmax(-1)
        return self.known[context, temperature]


VLLM = ["--model.rollout_backend", "vllm"]


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.__spec__ = SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "started", [])
    return LLM.started


def test_a_run_samples_with_the_weights_of_each_step(chain, tmp_path, vllm):
    options = ["--model.vllm_options", "{gpu_memory_utilization: 0.4}"]
    assert chain.run("fit", "rloo", *VLLM, *options, run=tmp_path) == 0
    (engine,) = vllm
    assert engine.options == {
        **{"skip_tokenizer_init": True, "load_format": "dummy", "gpu_memory_utilization": 0.4},
        **{"logprobs_mode": "processed_logprobs", "dtype": "float32", "seed": 0},
    }
    assert engine.loads == 3, "one rollout for two inner steps"
    trained, start, own = map(weights_of, (tmp_path, chain.root / "dpo", chain.root / "rloo"))
    key = "policy.transformer.wte.weight"
    assert not torch.equal(trained[key], start[key])
    assert not torch.equal(trained[key], own[key])
    # Those of the last rollout, two steps before the end.
    assert not torch.equal(engine.model.transformer.wte.weight, start[key])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16"), ("32-true", "float32")]
)
def test_the_engine_computes_as_the_policy_does(chain, tmp_path, vllm, precision, dtype):
    """From a file in bfloat16, whose weights are trained in float32 unless the precision is bf16-true."""
    folder = str(tmp_path / "model")
    export = ["--ckpt_path", chain.checkpoint("dpo"), "--output_dir", folder, "--dtype", "bfloat16"]
    assert main(["export", *export]) == 0
    options = ["--model.policy_path", folder, "--trainer.precision", precision, "--trainer.max_steps", "1"]
    assert chain.run("fit", "rloo", *VLLM, *options, run=tmp_path / "run") == 0
    (engine,) = vllm
    assert engine.options["dtype"] == dtype


def test_completions_follow_the_prompts_and_end_with_their_eos(chain, tmp_path, vllm):
    module, batch = attached(chain, tmp_path, RaoBlackwell())
    sampling = Sampling(400, 3, temperature=0.7)
    batch = {name: value[:1] for name, value in batch.items()}
    ours = module.pair.sample(batch, sampling, seed=0)
    backend = VLLMBackend()
    theirs = module.pair.sample(batch, sampling, seed=0, backend=backend)
    eos = module.tokenizer.eos_token_id
    for rollout in (ours, theirs):
        assert torch.equal(rollout.tokens[:, : batch["tokens"].shape[1]], batch["tokens"].expand(400, -1))
        ended = (rollout.completions == eos).cumsum(1) - (rollout.completions == eos).int()
        assert torch.equal(rollout.mask, ended == 0)
    # The same distribution: each first token's share differs by less than five standard errors.
    shares = [
        torch.bincount(r.completions[:, 0], minlength=module.policy.config.vocab_size) / 400
        for r in (ours, theirs)
    ]
    pooled = (shares[0] + shares[1]) / 2
    assert ((shares[0] - shares[1]).abs() <= 5 * (pooled * 2 / 400).sqrt() + 1e-6).all()
    again = module.pair.sample(batch, sampling, seed=0, backend=backend)
    assert torch.equal(again.tokens, theirs.tokens)


def test_an_engine_of_several_processes_is_refused(chain, tmp_path, capsys):
    options = ["--model.rollout_backend", "vllm", "--model.vllm_options", "{tensor_parallel_size: 2}"]
    assert chain.run("fit", "rloo", *options, run=tmp_path / "run") == 2
    problem = "tensor_parallel_size must be 1, as each process has an engine of its own, got 2"
    assert capsys.readouterr().err == f"error: model.init_args.vllm_options: {problem}\n"


def test_what_does_not_start_is_one_line_before_the_evaluation(chain, tmp_path, vllm, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("no memory\nfor the cache")

    monkeypatch.setattr(LLM, "__init__", fails)
    assert chain.run("fit", "rloo", *VLLM, run=tmp_path / "run") == 2
    expected = "error: model.init_args.vllm_options: vLLM does not start: no memory for the cache\n"
    assert capsys.readouterr().err.endswith(expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("targets", ["all-linear", ["wte"]])  # the second's weight is the head's, too
def test_an_adapter_is_merged_into_what_is_sent(chain, tmp_path, vllm, targets):
    module, batch = attached(chain, tmp_path, RaoBlackwell(), rollout_backend="vllm")
    add_adapter(module.policy, {"target_modules": targets, "init_lora_weights": False}, seed=0)
    before = {name: weight.clone() for name, weight in module.policy.state_dict().items()}
    rollout = module.pair.sample(batch, Sampling(2, 3), seed=0, backend=module.backend)
    own = module.pair.scorer.logprobs(rollout).detach()
    torch.testing.assert_close(rollout.logprobs, own, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(weight, before[name]) for name, weight in module.policy.state_dict().items())


def test_the_engines_own_logprobs_say_what_was_sampled(chain, tmp_path, vllm):
    module, batch = attached(chain, tmp_path, RaoBlackwell(), rollout_backend="vllm")
    module.training_step(batch, 0)
    rollout, *_ = module.experience
    scored = module.pair.scorer.logprobs(rollout).detach()
    torch.testing.assert_close(module.experience.behaviour_logprobs, rollout.logprobs)
    torch.testing.assert_close(rollout.logprobs, scored, rtol=1e-4, atol=1e-4)
    assert module.experience.metrics["sampler_kl"] < 1e-6


def expected_gradient(module, batch, tokens, probabilities, sampler=None):
    """The expectation of a step's gradient over completions of one token, by their probabilities."""
    total = 0
    prompts, mask = (batch[name].repeat_interleave(2, 0) for name in ("tokens", "attention_mask"))
    one = torch.ones(2, 1, dtype=torch.bool)
    for token in tokens:
        logprobs = None if sampler is None else sampler[token].log().expand(2, 1)
        drawn = Rollout(
            torch.cat([prompts, token.expand(2, 1)], 1), torch.cat([mask.bool(), one], 1), one, logprobs
        )
        module.backend = lambda *_, rollout=drawn, **__: rollout
        module.zero_grad()
        module.training_step(batch, 0).backward()
        total += probabilities[token] * torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    return total


@pytest.mark.parametrize(("off_policy", "unbiased"), [("prefix", True), ("sequence", True), ("none", False)])
def test_samples_of_another_distribution_have_the_policys_gradient(chain, tmp_path, off_policy, unbiased):
    estimator = RaoBlackwell(off_policy=off_policy, baseline=None)
    module, batch = attached(chain, tmp_path, estimator)
    batch = {name: value[:1] for name, value in batch.items()}
    module.completions_per_prompt = 2
    count = module.policy.config.vocab_size
    tokens = torch.cat([batch["tokens"][0], torch.arange(0, count, 8)]).unique()
    with torch.no_grad():  # no others are likely
        hidden = module.policy.transformer(batch["tokens"]).last_hidden_state[0, -1]
        others = torch.ones(count, dtype=torch.bool).index_fill(0, tokens, False)
        module.policy.transformer.wte.weight[others] -= 30 * hidden / hidden.square().sum()
    logits = module.policy(batch["tokens"]).logits[0, -1].detach()
    policy, sampler = logits.softmax(-1), (4 * logits).softmax(-1)
    assert policy[others].sum() < 1e-6
    exact = expected_gradient(module, batch, tokens, policy)
    other = expected_gradient(module, batch, tokens, sampler, sampler)
    assert module.experience.metrics["sampler_kl"] > 0
    distance = (other - exact).norm() / exact.norm()
    assert distance < 1e-3 if unbiased else distance > 0.1
