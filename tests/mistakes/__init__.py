"""Wrong input by the hundred, and what each command must say of it."""
