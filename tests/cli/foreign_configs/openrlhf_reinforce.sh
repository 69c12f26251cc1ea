#!/bin/bash
KL=(
   --algo.kl.init_coef 1e-4
   # --algo.kl.use_loss
   --algo.kl.estimator k1
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path small/model \
   --algo.advantage.estimator reinforce_baseline ${KL[@]}
