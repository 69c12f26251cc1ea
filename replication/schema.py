"""Names of the studies of enumerated models."""

PITFALLS = "pitfalls"
OFF_POLICY = "off_policy"
DISTILLATION = "distillation"
IDENTITIES = "identities"
# In PITFALLS and DISTILLATION, gradient descent with the exact gradient, beside the estimators.
ANALYTIC = "analytic"
