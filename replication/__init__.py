"""What reproduces papers and published results: outside the wheel, beside the packages that it uses."""
