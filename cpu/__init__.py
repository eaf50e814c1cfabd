"""CPU kernels: numpy reference kernels and the compiled ones. Knows arrays and packed weights, not models or files."""
