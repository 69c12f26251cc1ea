#!/bin/bash
# RLOO on one machine
accelerate launch --num_processes 4 examples/scripts/rloo.py \
    --model_name_or_path small/model \
    --beta 0.07 \
    --num_generations 4
