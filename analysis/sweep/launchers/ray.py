"""Runs cells as Ray tasks: on this machine, or on the nodes of a cluster that share the sweep's directory.

Ray only schedules cells: a task runs its cell once, and the coordinator decides whether it is run again, as
with every launcher.
"""

import pickle
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from analysis.design.resources import visible_gpus
from analysis.sweep.job import FAILED, MISPLACED, Job
from analysis.sweep.launchers import Exit, Options
from lit_klrb.errors import ConfigurationError, brief


class RayLauncher:
    """Runs one Ray task per cell.

    Every Ray worker has a server with the libraries imported, from which its cells are forked. A node that
    cannot run cells, as it lacks the directory or the packages, or has others, is given one and then no more.

    Args:
        options: The address is auto or host:port of a running cluster; None starts one on this machine. A
            cell asks Ray for its cores and GPUs.

    Raises:
        ConfigurationError: If Ray is not installed.
    """

    remote, gpus = True, None

    def __init__(self, options: Options) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigurationError("--launcher ray needs Ray: pip install 'lit-klrb[ray]'") from None
        resources: dict[str, Any] = {"include_dashboard": False}
        if options.workers:
            resources["num_cpus"] = options.workers * options.threads
        if visible := len(visible_gpus()):
            resources["num_gpus"] = visible
        where = {"address": options.address} if options.address else {"address": "local", **resources}
        ray.init(log_to_driver=False, logging_level="ERROR", **where)
        self._ray: Any = ray
        self._run = ray.remote(max_retries=0)(_task())
        each = {"CPU": options.threads * options.processes, "GPU": options.gpus}
        there = ray.cluster_resources()
        fit = min(int(there.get(name, 0)) // number for name, number in each.items() if number)
        self.slots = options.workers or max(1, fit)
        self._running: dict[Any, str] = {}
        self._unfit: set[str] = set()

    def submit(self, job: Job) -> None:
        """Submit a job to Ray; it starts when a node has free CPUs.

        Raises:
            OSError: If no node can run it.
        """
        elsewhere = replace(job, directory=job.directory.absolute())
        nodes = {node: size for node, size in self._sizes().items() if size["GPU"] >= job.gpus}
        # A task that asks for more than any node has would wait for ever
        cores = min(job.cores, max((size["CPU"] for size in nodes.values()), default=1))
        options: dict[str, Any] = {"num_cpus": cores, "num_gpus": job.gpus}
        if all(node in self._unfit or size["CPU"] < cores for node, size in nodes.items()):
            raise OSError(f"no node of the cluster can run it{f', with {job.gpus} GPUs' * bool(job.gpus)}")
        if self._unfit:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self._unfit))})"}
        self._running[self._run.options(**options).remote(pickle.dumps(elsewhere))] = job.cell.id

    def _sizes(self) -> dict[str, dict[str, int]]:
        """Numbers of CPUs and GPUs of the nodes, by name."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return {
            node["NodeID"]: {kind: int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU")}
            for node in nodes
        }

    def wait(self, seconds: float) -> list[Exit]:
        """Wait until a job has ended, at most `seconds`."""
        if not self._running:
            time.sleep(seconds)
            return []
        ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        exits = []
        for task in ended:
            try:
                code, reason, node = self._ray.get(task)
                if code == MISPLACED:
                    self._unfit.add(node)
            except self._ray.exceptions.RayError as error:
                # The worker or its node has failed, and the cell with it
                code, reason = FAILED, brief(error)
            exits.append(Exit(self._running.pop(task), code, reason))
        return exits

    def ask_to_stop(self) -> None:
        """Kill the running cells, which Ray cannot signal; the next sweep resumes their checkpoints."""
        for task in self._running:
            self._ray.cancel(task, force=True)

    def stop(self) -> None:
        """Kill the running tasks and leave the cluster."""
        self.ask_to_stop()
        self._running.clear()
        self._ray.shutdown()


def _task() -> Callable[[bytes], tuple[int, str, str]]:
    """What runs a pickled job on a node, and returns its exit code, why, and Ray's name of the node.

    It is local, as Ray sends only such functions as they are, also to a node that lacks this package.
    """

    def on_node(payload: bytes) -> tuple[int, str, str]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            from analysis.sweep.launchers.local import run_forked

            job = pickle.loads(payload)
        except (ImportError, AttributeError) as error:
            return MISPLACED, f"{platform.node()} cannot start cells: {error}", node
        return *run_forked(job), node

    return on_node
