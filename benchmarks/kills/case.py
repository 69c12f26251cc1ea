"""The small runs and sweeps that are killed: the demo's configurations with few steps and small models."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

DEMO = Path(__file__).parents[2] / "configs" / "demo"
MODEL, DATA = "model.init_args", "data.init_args"
STEPS = {
    "trainer.max_steps": 16,
    "trainer.val_check_interval": 8,
    "trainer.enable_progress_bar": False,
}
LABELLED = {f"{DATA}.train_size": 256, f"{DATA}.eval_size": 32, f"{DATA}.batch_size": 8, **STEPS}
PROMPTS = {
    f"{DATA}.train_size": 32,
    f"{DATA}.eval_size": 8,
    f"{DATA}.batch_size": 4,
    f"{MODEL}.max_new_tokens": 8,
    **STEPS,
}
SMALL: dict[str, dict[str, Any]] = {
    "sft": LABELLED,
    "reward": LABELLED,
    "dpo": PROMPTS,
    "rloo": {**PROMPTS, f"{MODEL}.mini_batches": 2, "kl.target_kl": 0.1, "kl.horizon": 20},
    "distill": {**PROMPTS, f"{MODEL}.policy_config.n_embd": 64},
}
STAGES = tuple(SMALL)


def write_configs(folder: Path) -> None:
    """A configuration file for each stage, which starts from the runs in `folder`."""
    for stage, small in SMALL.items():
        config = OmegaConf.load(DEMO / f"{stage}.yaml")
        upstream = {"policy_path": "dpo", "reference_path": "sft"}
        paths = {
            f"{MODEL}.{key}": str(folder / other / "checkpoints" / "last.ckpt")
            for key, other in upstream.items()
            if OmegaConf.select(config, f"{MODEL}.{key}")
        }
        for key, value in {**small, **paths}.items():
            OmegaConf.update(config, key, value, force_add=True)
        OmegaConf.save(config, folder / f"{stage}.yaml")


def write_plan(folder: Path, directory: Path) -> Path:
    """A plan of six cells that keeps its files in `directory`."""
    reference = {f"{MODEL}.reference_path": "sft"}
    plan = {
        "name": directory.name,
        "directory": str(directory),
        "stages": {
            "sft": {"config": str(folder / "sft.yaml")},
            "dpo": {"config": str(folder / "dpo.yaml"), "inputs": reference},
            "rloo": {
                "config": str(folder / "rloo.yaml"),
                "inputs": {**reference, f"{MODEL}.policy_path": "dpo"},
                # Long enough that most kills are after a checkpoint.
                "overrides": {"trainer.max_steps": 80, "checkpoint.every_n_train_steps": 2},
            },
        },
        "grid": {"arms": ["MonteCarlo", "RaoBlackwell"], "beta": {0: 0.1}, "replicates": 2},
        "primary": {"control": "MonteCarlo"},
    }
    path = folder / f"{directory.name}.yaml"
    OmegaConf.save(OmegaConf.create(plan), path)
    return path
