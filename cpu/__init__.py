"""CPU kernels: numpy reference kernels and the compiled ones. Knows arrays and packed weights; nothing of models or files."""
