deepspeed --module openrlhf.cli.train_ppo --pretrain small/model --init_kl_coef 0.01 --use_kl_loss --kl_estimator=k3 \
   --advantage_estimator group_norm
