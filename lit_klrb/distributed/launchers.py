"""How processes of one run find each other: SLURM, torchrun, or Lightning itself."""

import os

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lit_klrb.distributed.fsdp2 import FSDP2
from lit_klrb.errors import ConfigurationError


def cluster_plugins() -> list[ClusterEnvironment]:
    """How processes of a SLURM job find each other; empty elsewhere, where Lightning decides.

    A job step that `srun` started has one process for each task. A batch script without it is one process,
    however many tasks the job has, and starts those of its devices itself. Requeueing is left to `Stops`.
    """
    if "SLURM_NTASKS" not in os.environ or TorchElasticEnvironment.detect():
        return []
    if not _in_a_step():
        return [LightningEnvironment()]
    tasks, nodes = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("NTASKS", "NNODES"))
    if tasks % nodes == 0:  # what --ntasks alone does not say
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(tasks // nodes))
    return [SLURMEnvironment(auto_requeue=False)]


def _in_a_step() -> bool:
    """Whether `srun` has started this process, with those of the other tasks."""
    return "SLURM_STEP_ID" in os.environ and SLURMEnvironment.job_name() not in ("bash", "interactive")


def check_started(trainer: L.Trainer) -> None:
    """Check that a launcher has started no more processes than train together: each would train alone."""
    number = trainer.num_devices * trainer.num_nodes
    variable = "WORLD_SIZE" if TorchElasticEnvironment.detect() else "SLURM_NTASKS" if _in_a_step() else ""
    if (started := int(os.environ.get(variable, 1))) > number:
        text = f"must give as many processes as the launcher started, {started}, got {number}"
        raise ConfigurationError(text, key="trainer.devices")


def check_strategy(trainer: L.Trainer) -> None:
    """Check that models are whole in each process, or divided by FSDP2."""
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, FSDP2)):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} is not supported; use ddp, one device, or fsdp2 for models "
            "larger than a device",
            key="trainer.strategy",
        )
