"""Rollouts: a pair of models that samples and scores them, and the way from a rollout to a loss."""
