"""The run directory: what `lit_klrb` writes and `analysis` reads. Names only; imports nothing.

RUN/run.json                       the run's id, which marks the directory as a run
RUN/config.yaml                    the resolved configuration
RUN/metrics/attempt_N/metrics.csv  one row per logged step, appended; a resumed run starts a new file
RUN/tensorboard/attempt_N/         the same for TensorBoard
RUN/checkpoints/last.ckpt          the newest checkpoint (policy, optimizer, step; never the reference)
RUN/checkpoints/previous.ckpt      the one before it
RUN/studies/*.json                 artifacts of studies, if the run has any
RUN/completions/step_N.csv         completions of an evaluation and of the first one, by `CompletionTable`
RUN/kl_by_position/step_N.csv      the KL at each position of the completions, by `KLMonitor`
RUN/evaluation.csv                 the final evaluation: one row per prompt, means over its completions
RUN/summary.json                   written last: how the run ended, and the final evaluation
"""

RUN = "run.json"
CONFIG = "config.yaml"
METRICS_DIR = "metrics"
TENSORBOARD = "tensorboard"
CHECKPOINT = "checkpoints/last.ckpt"
PREVIOUS_CHECKPOINT = "checkpoints/previous.ckpt"
STUDIES = "studies"
COMPLETIONS = "completions"
KL_BY_POSITION = "kl_by_position"
EVALUATION = "evaluation.csv"
SUMMARY = "summary.json"
# All files and folders that runs write.
OWN = (
    *(RUN, CONFIG, METRICS_DIR, TENSORBOARD, "checkpoints"),
    *(STUDIES, COMPLETIONS, KL_BY_POSITION, EVALUATION, SUMMARY),
)

# A sweep's directory: published results by cell id, and the run directories of its cells.
RESULTS = "results"
CELLS = "cells"

# Studies by name.
ESTIMATION = "estimation"
GRADIENT_NOISE = "gradient_noise"
# Version number of the format of their artifacts.
STUDY_SCHEMA = 2

# The states of a run that has ended (`summary.json`: "state").
DONE = "done"
DIVERGED = "diverged"

# In `summary.json`, and in what a sweep publishes: SHA-256 of the names and bytes of the trained weights.
WEIGHTS = "weights_sha256"
# In both: split -> SHA-256 of the encoded rows, in their order.
ROWS = "rows_sha256"
# In both: the number of processes that trained together, and of rows on which all of them train in a step.
PROCESSES, STEP_ROWS = "processes", "rows_per_step"
# In `summary.json`: the number of prompts of the evaluation, which its standard errors are of.
PROMPTS = "evaluation_prompts"
# Among the `versions` of both, of the packages that a run depends on: the processor.
PROCESSOR = "processor"

# Settings on which the common evaluation depends: runs that differ in one of them cannot be compared.
EVALUATED_WITH = (
    *("model.reference_path", "model.reward_path", "model.reward_label", "model.reward_output"),
    *("model.max_new_tokens", "model.stop_at_eos", "model.temperature", "model.evaluation_completions"),
    *("model.final_evaluation_completions", "model.evaluation_seed", "data.source", "data.eval_size"),
    *("data.eval_batch_size", "data.min_prompt_tokens", "data.max_prompt_tokens", "data.system_prompt"),
    *("data.teacher_system_prompt", "data.teacher_examples", "data.subset", "data.split", "data.eval_split"),
    *("data.columns", "data.overlong", "data.chat_template_kwargs", "data.teacher_chat_template_kwargs"),
    *("model.teachers", "trainer.precision"),
)
# The trainer's option without which a run has no results.
LIMIT_VAL_BATCHES = "trainer.limit_val_batches"

# Metric keys, logged as `train/...` at each step and `val/...` at each evaluation.
STEP = "step"
REWARD = "reward"
REWARD_SE = "reward_se"
KL = "kl"
# What precedes the names of numbers that rewards log, after train/
LOGGED = "logged/"
KL_SE = "kl_se"
LENGTH = "length"
LOSS = "loss"
