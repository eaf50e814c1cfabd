// Weights as the layer shaders read them (ddllm_vk/gpu/weights.py packs them): a matrix [N, K] in tiles of WEIGHT_TILE
// rows, N filled up with zeros, read 16 bytes at a time. A tile's data lie side by side, so that neighbouring
// invocations, which take neighbouring rows, read neighbouring words. In order, for each tile:
//
// Q40        [K/32] blocks of 18 uvec4: 2 hold the float16 scales of the 16 rows; then, for each row, its 16 bytes of
//            nibbles as in a file (quants.py): the low ones are weights 0..15, the high ones 16..31
// Q80        [K/32] blocks of 34 uvec4: 2 of scales, then the int8 weights 0..15 of each row, then 16..31 of each row
// F16, BF16  [ceil(K/8)][16] uvec4, each 8 columns of one row, padded with zeros
// F32        [ceil(K/4)][16] uvec4, each 4 columns of one row, padded with zeros
//
// Whoever includes this declares `weight`, an array of uvec4, and defines the format.

const uint WEIGHT_TILE = 16;
const uint BLOCK = 32;

#if defined(Q40)
const uint STEP_WORDS = 18;  // uvec4 of one tile and one step of columns
const uint STEP_COLUMNS = 32;
#elif defined(Q80)
const uint STEP_WORDS = 34;
const uint STEP_COLUMNS = 32;
#elif defined(F32)
const uint STEP_WORDS = 16;
const uint STEP_COLUMNS = 4;
#else
const uint STEP_WORDS = 16;
const uint STEP_COLUMNS = 8;
#endif

// Steps of columns in a tile.
uint weight_steps(uint columns) {
    return (columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
}

// The float16 at place `row` of the 16 in two uvec4.
float tile_scale(uvec4 scales, uint row) {
    const uint word = scales[(row / 2) & 3];
    return unpackHalf2x16(word >> ((row & 1) * 16)).x;
}

// Columns 4 i .. 4 i + 3 of a step, of row `row` of the tile whose step begins at uvec4 `at`; Q40 and Q80 unscaled.
vec4 weight_quad(uint at, uint row, uint i) {
#if defined(Q40)
    const uint word = weight[at + 2 + row][i & 3] >> (i >> 2) * 4;
    return vec4(word & 15u, word >> 8 & 15u, word >> 16 & 15u, word >> 24 & 15u) - 8.0;
#elif defined(Q80)
    const int word = int(weight[at + 2 + (i >> 2) * WEIGHT_TILE + row][i & 3]);
    return vec4(bitfieldExtract(word, 0, 8), bitfieldExtract(word, 8, 8), bitfieldExtract(word, 16, 8), word >> 24);
#elif defined(F32)
    return uintBitsToFloat(weight[at + row]);
#elif defined(F16)
    const uint low = weight[at + row][2 * i], high = weight[at + row][2 * i + 1];
    return vec4(unpackHalf2x16(low), unpackHalf2x16(high));
#else
    const uint low = weight[at + row][2 * i], high = weight[at + row][2 * i + 1];
    return uintBitsToFloat(uvec4(low << 16, low & 0xFFFF0000u, high << 16, high & 0xFFFF0000u));
#endif
}

// What weight_quad is to be multiplied with: the scale of Q40 and Q80.
float weight_scale(uint at, uint row) {
#if defined(Q40) || defined(Q80)
    return tile_scale(weight[at + row / 8], row);
#else
    return 1.0;
#endif
}
