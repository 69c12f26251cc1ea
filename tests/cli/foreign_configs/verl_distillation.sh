LOSS_MODE=${LOSS_MODE:-k1}
ARGUMENTS=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path=small/student
    distillation.enabled=True
    distillation.teacher_models.teacher_model.model_path=small/teacher
    distillation.distillation_loss.loss_mode=$LOSS_MODE
    distillation.distillation_loss.use_task_rewards=False
    distillation.distillation_loss.use_policy_gradient=True
)
python3 -m verl.trainer.main_ppo "${ARGUMENTS[@]}"
