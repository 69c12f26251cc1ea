"""The short help of the commands that train and evaluate, without the options of Lightning."""

# Key and description; tests/cli/test_help.py compares the keys with the parser's.
KEYS = {
    "config": "FILE     a configuration; configs/ has one per stage; later files and options win",
    "ckpt_path": "FILE  with fit: the run to resume; otherwise the checkpoint to evaluate",
    "seed_everything": "N  seed of all random numbers of the run",
    "kl.estimator": "CLASS  estimator of the KL's gradient: lit-klrb explain",
    "kl.beta": "NUMBER  weight of the KL, in reward per nat",
    "kl.target_kl": "NATS  adjust beta to reach this KL per completion",
    "model": "CLASS     SFTModule, RewardModule, PairwiseRewardModule, DPOModule, RLOOModule, DistillModule",
    "model.policy_path": "PATH  the initial policy: a hub id, a folder, a .gguf file or a checkpoint",
    "model.reference_path": "PATH  the frozen reference",
    "model.reward_path": "PATH  a classifier, package.module:function, or grammar",
    "model.completions_per_prompt": "N  completions sampled per prompt",
    "model.max_new_tokens": "N  maximum length of a completion",
    "model.learning_rate": "NUMBER  of AdamW",
    "data": "CLASS      PromptDataModule, PreferenceDataModule, TextDataModule, TextPairDataModule, ...",
    "data.source": "PATH  a .jsonl, .json, .csv, .tsv, .parquet or .txt file, a folder, or a hub id",
    "data.batch_size": "N  examples or prompts per step",
    "trainer.max_steps": "N  optimizer steps",
    "trainer.devices": "N  processes, of which each trains on a GPU and a batch of its own (default: 1)",
    "trainer.default_root_dir": "DIR  the run directory",
    "trainer.callbacks": "CLASS  with += in place of the space, one more: KLMonitor, CompletionTable, ...",
}
TEXT = """\
usage: lit-klrb {command} --config FILE [--KEY VALUE ...]

{does}.

Every key of a configuration is an option, and init_args may be left out: model.init_args.learning_rate is
--model.learning_rate. The keys that matter most:

{keys}

  --print_config           print the resulting configuration, and stop
  --model.help CLASS       every setting of a class; also --data.help, --kl.estimator.help
  --help-all               every option, Lightning's included
"""


def short_help(command: str, does: str) -> str:
    """The text of `COMMAND --help`."""
    rows = [(f"  --{key} {text.split()[0]}", text.split(maxsplit=1)[1]) for key, text in KEYS.items()]
    width = max(len(option) for option, _ in rows) + 2
    keys = "\n".join(f"{option:<{width}}{text}" for option, text in rows)
    return TEXT.format(command=command, does=does[0].upper() + does[1:], keys=keys)
