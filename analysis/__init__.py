"""Plans, runs and reads seed sweeps; never imports torch or lightning."""
