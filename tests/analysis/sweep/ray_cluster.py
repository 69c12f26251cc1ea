"""A cluster of two nodes on this machine: prints its address; loses a node at the first line of its input.

An argument is a shell command that mounts something for the second node alone.
"""

import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path


def main(mount=""):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    with ExitStack() as stack:
        stack.callback(cluster.shutdown)
        if mount:
            start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2"]
            shell = f"{mount} && exec {shlex.join([*start, f'--address={cluster.address}'])}"
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert any("runtime started" in line for line in process.stdout)
        else:
            second = cluster.add_node(num_cpus=2)
        print("address", cluster.address, flush=True)
        if sys.stdin.readline():
            cluster.remove_node(second, allow_graceful=False)
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
