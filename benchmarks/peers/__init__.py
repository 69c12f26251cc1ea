"""The KL and distillation losses of other software: each released one is called and certified."""
