"""`ServerDistillationTrainer` with a teacher that a server of vLLM's protocol stands for."""

import datasets
import pytest
import torch
from served_teacher import Handler, TeacherServer
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import RaoBlackwellTopK
from lit_klrb.functional.enumeration import TabularLM
from lit_klrb.integrations import trl as adapter

V, LENGTH, PROMPT = 5, 2, [3, 1]
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"t{token}": token for token in range(V)}, "t1")),
    eos_token="t0",
    pad_token="t0",
)


class WithHealth(Handler):
    """TRL's client asks whether the server is there."""

    def do_GET(self):
        if self.path == "/health":
            self.answer({})
        else:
            super().do_GET()


def model(seed):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": V,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 8,
        "initializer_range": 0.5,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens)).eval()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)  # of which its client needs nothing
    monkeypatch.setattr("served_teacher.Handler", WithHealth)
    with TeacherServer(model(1), decode=TOKENIZER.decode) as server:
        yield server


def trainer_of(folder, server, estimator=None, **settings):
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    address = server.address.removesuffix("/v1")
    arguments = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "max_completion_length": LENGTH}
    arguments |= {"max_steps": 1, "disable_dropout": True, "teacher_model_server_url": address, **settings}
    return adapter.with_kl_estimator(ServerDistillationTrainer)(
        model=model(0),
        args=ServerDistillationConfig(**arguments),
        processing_class=TOKENIZER,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["t3"] * 8}),
        eval_dataset=datasets.Dataset.from_dict({"prompt": ["t2"] * 4}),
        **({} if estimator is None else {"kl_estimator": estimator}),
    )


def every_completion():
    """All completions of at most two tokens, as TRL's batch, and their mask."""
    tokens, mask = TabularLM(torch.zeros(1, V), LENGTH).sequences()
    prompts = torch.tensor(PROMPT).expand(len(tokens), -1)
    batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    return {**batch, "completion_ids": tokens, "completion_mask": mask.long()}, mask


def logprobs_of(policy, batch):
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    logits = policy(tokens).logits[:, len(PROMPT) - 1 : -1]
    chosen = logits.double().log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    return (chosen * batch["completion_mask"]).sum(1)


def flat_gradient(policy, loss):
    gradients = torch.autograd.grad(loss, [*policy.parameters()], materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("k", range(1, V + 1))
def test_the_expected_gradient_is_the_exact_one(tmp_path, server, monkeypatch, k):
    """In float32; in bfloat16 rounding would be compared."""
    estimator = RaoBlackwellTopK(k=k, support="reference", baseline=None)
    trainer = trainer_of(tmp_path, server, estimator, bf16=False, per_device_train_batch_size=8)
    batch, _ = every_completion()
    policy = trainer.model.train()  # it has no dropout
    log_p = logprobs_of(policy, batch)
    probabilities = log_p.exp()
    exact = flat_gradient(policy, probabilities @ (log_p - logprobs_of(server.model, batch)))

    parent = type(trainer).__mro__[1]
    monkeypatch.setattr(parent, "_generate_and_score_completions", lambda self, inputs: batch)
    trainer.state.max_steps = 1
    trainer.current_gradient_accumulation_steps = 1
    scored = trainer._generate_and_score_completions(None)
    expected = torch.zeros_like(exact)
    for row, probability in enumerate(probabilities.tolist()):
        alone = {name: value[row : row + 1] for name, value in scored.items()}
        expected += probability * flat_gradient(policy, trainer.compute_loss(policy, alone))
    assert torch.nn.functional.cosine_similarity(expected, exact, dim=0) > 0.9999
    assert (expected - exact).norm() < 1e-4 * exact.norm()
    assert all(question["prompt_logprobs"] == k for question in server.questions)


@pytest.mark.filterwarnings("ignore")
def test_it_trains_and_is_evaluated_at_trls_defaults(tmp_path, server, monkeypatch):
    monkeypatch.setattr(adapter, "DEFAULT_K", 3)
    trainer = trainer_of(tmp_path, server, eval_strategy="steps", eval_steps=1)
    own_token = RaoBlackwellTopK(k=3, support="reference", baseline=None, discount=0.0)
    assert (trainer.kl_memory.estimator, trainer.kl_memory.finals) == (own_token, {"discount": 1})
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    assert not torch.equal(trainer.model.lm_head.weight, before)
    (evaluation,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluation["eval_loss"] == pytest.approx(evaluation["eval_kl_per_sequence"], rel=1e-5)
    assert evaluation["eval_loss"] > 0


@pytest.mark.filterwarnings("ignore")
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, server):
    server.decode = "word {}".format
    message = "^teacher_model_server_url: http://.* has another tokenizer than the policy"
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(tmp_path, server, RaoBlackwellTopK(k=2, support="reference", baseline=None))
