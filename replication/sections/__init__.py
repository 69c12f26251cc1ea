"""The sections of reports about studies of enumerated models."""

from replication.sections.distillation import distillation
from replication.sections.off_policy import off_policy
from replication.sections.pitfalls import pitfalls

SECTIONS = (pitfalls, off_policy, distillation)
