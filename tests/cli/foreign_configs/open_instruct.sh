#!/bin/bash
python launch.py --gpus 8 -- python open_instruct/grpo_fast.py \
    --model_name_or_path small/model \
    --beta 0.03 \
    --num_epochs 1
