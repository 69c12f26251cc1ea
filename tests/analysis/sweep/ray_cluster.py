"""A cluster of two nodes on this machine: prints its address; loses a node at the first line of its input."""

import sys


def main():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=2)
    print("address", cluster.address, flush=True)
    sys.stdin.readline()
    cluster.remove_node(second, allow_graceful=False)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
