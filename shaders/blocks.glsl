// Q40 and Q80 blocks as they lie in a file (ddllm_vk/quants.py), read through 32-bit words. A block begins at an even
// byte. Whoever includes this defines WEIGHT_WORD(i): word i of the matrix.

const uint BLOCK = 32;
const uint Q40_BYTES = 18;
const uint Q80_BYTES = 34;

// The two bytes at an even byte.
uint half_word(uint at) {
    return (WEIGHT_WORD(at >> 2) >> ((at & 2) * 8)) & 0xFFFFu;
}

float block_scale(uint block) {
    return unpackHalf2x16(half_word(block)).x;
}

// Weight j (0..31) of the Q40 block at byte `block`, without its scale: -8..7.
int q40_weight(uint block, uint j) {
    const uint two_bytes = half_word(block + 2 + (j & 14));
    return int((two_bytes >> ((j & 1) * 8 + (j >> 4) * 4)) & 15u) - 8;
}

// Weight j (0..31) of the Q80 block at byte `block`, without its scale: -127..127.
int q80_weight(uint block, uint j) {
    return bitfieldExtract(int(half_word(block + 2 + (j & 30))), int(j & 1) * 8, 8);
}
