"""Which gradient the KL and distillation losses of other software have: each released one called and certified."""
