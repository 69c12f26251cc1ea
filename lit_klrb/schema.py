"""The run directory: what `lit_klrb` writes and `analysis` reads. Names only; imports nothing.

RUN/config.yaml              the resolved configuration
RUN/metrics/attempt_N.csv    one row a logged step; a resumed run starts a new file
RUN/checkpoints/last.ckpt    the newest checkpoint (policy, optimizer, step; never the reference)
RUN/studies/*.json           what studies of the policy at moments of the run have measured, if it had any
RUN/summary.json             written last and atomically: how the run ended, and the final evaluation
"""

CONFIG = "config.yaml"
METRICS_DIR = "metrics"
CHECKPOINT = "checkpoints/last.ckpt"
STUDIES = "studies"
SUMMARY = "summary.json"

# Studies by name.
ESTIMATION = "estimation"
GRADIENT_NOISE = "gradient_noise"

# How a run can end (`summary.json`: "state").
DONE = "done"
DIVERGED = "diverged"

# Metric keys, `train/...` each step and `val/...` at each evaluation.
STEP = "step"
REWARD = "reward"
REWARD_SE = "reward_se"
KL = "kl"
KL_SE = "kl_se"
LENGTH = "length"
LOSS = "loss"
