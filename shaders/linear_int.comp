// linear_*_int: result = x @ weight.T in integers: x as quantize_rows left it, the products of a block exact in int32,
// then times both scales and summed over the blocks in float32. experts_linear_*_int: the same with a matrix for each
// tile of rows.
//
// x       uvec4 [x rows, columns/32, 3]        what quantize_rows wrote
// weight  uvec4 [tiles, columns/32, 18 or 34]  Q40 or Q80, weights.glsl; several experts one after the other
// result  float [rows, stride]                 written: columns first .. first + count - 1, count rows of `weight`
// limit   int [1]                              rows from here on are not written (linear)
// work    uint [1 + 3 * tiles]                 of group_experts (experts_linear)
// pairs   uint [rows]                          of group_experts: row r takes row pairs[r] / top_k of x (experts_linear)
//
// push: columns, a multiple of 32; first, count, stride; rows (linear); first_expert, experts: those of `weight`, and
// top_k, 0 if row r takes row r of x (experts_linear); the _at of every binding, x_at and weight_at multiples of 4.
// Groups: (ceil(rows / TILE_ROWS), ceil(count / (WORKGROUP_X * TILE_COLUMNS))); experts_linear: (the most tiles, ...).
// Reference: reference.linear of reference.quantize_dequantize_rows(x); reference.experts.
//
// Q40 makes two products with one multiplication: the halves of a word of x hold biased codes u0 : u1, those of the
// weights w1 : w0, so that the upper half of the product is u0 w0 + u1 w1. Eight of them cannot carry into or out of
// it: 8 * 2 * 255 * 15 < 2^16. The biases are taken off with the sums of the codes and of the weights.
//
// variant: linear_q40_int Q40
// variant: linear_q40_int_subgroup Q40 SUBGROUP
// variant: linear_q80_int Q80
// variant: linear_q80_int_subgroup Q80 SUBGROUP
// variant: experts_linear_q40_int Q40 GROUPED
// variant: experts_linear_q40_int_subgroup Q40 GROUPED SUBGROUP
// variant: experts_linear_q80_int Q80 GROUPED
// variant: experts_linear_q80_int_subgroup Q80 GROUPED SUBGROUP
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(std430, binding = 0) readonly buffer X { uvec4 x[]; };

#include "linear.glsl"

const uint BYTES = 0x00FF00FFu;

#ifdef Q40
const uint PAIR = 0x000F000Fu;
#define WEIGHTS uvec4[4]

// Pairs of weights as they meet the codes of words 0..3, 4..7, and their odd bytes.
uvec4[4] pairs_of(uint at, uint row) {
    const uvec4 w = weight[at + 2 + row];
    return uvec4[4](w & PAIR, (w >> 4) & PAIR, (w >> 8) & PAIR, (w >> 12) & PAIR);
}

// What the biases add to a block's products, apart from the codes' part: -sum of 128 (w - 8).
int bias_of(uvec4 w[4]) {
    const uvec4 sums = w[0] + w[1] + w[2] + w[3];
    const uint sum = sums.x + sums.y + sums.z + sums.w;
    return 32 * 128 * 8 - 128 * int((sum & 0xFFFFu) + (sum >> 16));
}

int products(uvec4 x0, uvec4 x1, uint sum, uvec4 w[4], int bias) {
    const uvec4 p = (x0 & BYTES) * w[0] + ((x0 >> 8) & BYTES) * w[2];
    const uvec4 q = (x1 & BYTES) * w[1] + ((x1 >> 8) & BYTES) * w[3];
    const uint high = ((p.x + p.y + p.z + p.w) >> 16) + ((q.x + q.y + q.z + q.w) >> 16);
    return int(high) + bias - 8 * int(sum);
}
#else
#define WEIGHTS uvec4[2]

// The words of a block of weights, their bytes in the order of the codes.
uvec4[2] pairs_of(uint at, uint row) {
    const uvec4 w0 = weight[at + 2 + row], w1 = weight[at + 2 + WEIGHT_TILE + row];
    return uvec4[2](w0 << 16 | w0 >> 16, w1 << 16 | w1 >> 16);
}

int bias_of(uvec4 w[2]) {
    return 0;
}

int products(uvec4 x0, uvec4 x1, uint sum, uvec4 w[2], int bias) {
    const ivec4 a0 = ivec4(x0 ^ 0x80808080u), a1 = ivec4(x1 ^ 0x80808080u);
    const ivec4 b0 = ivec4(w[0]), b1 = ivec4(w[1]);
    ivec4 p = (a0 >> 24) * (b0 >> 24) + (a1 >> 24) * (b1 >> 24);
    [[unroll]] for (int at = 0; at < 24; at += 8) {
        p += bitfieldExtract(a0, at, 8) * bitfieldExtract(b0, at, 8);
        p += bitfieldExtract(a1, at, 8) * bitfieldExtract(b1, at, 8);
    }
    return p.x + p.y + p.z + p.w;
}
#endif

void main() {
    if (!locate()) {
        return;
    }
    const uint blocks = columns / BLOCK;
#ifdef SUBGROUP
    const uint x_from = x_at / 4 + x_row(gl_SubgroupInvocationID % TILE_ROWS) * blocks * 3;
#else
    uint x_from[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        x_from[m] = x_at / 4 + x_row(m) * blocks * 3;
    }
#endif

    float total[TILE_ROWS][TILE_COLUMNS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
            total[m][n] = 0.0;
        }
    }
    for (uint b = 0; b < blocks; b++) {
        const uint w_at = tile_at + b * STEP_WORDS;
        const uvec4 scales = weight[w_at + lane / 8];
        WEIGHTS w[TILE_COLUMNS];
        float scale[TILE_COLUMNS];
        int bias[TILE_COLUMNS];
        [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
            w[n] = pairs_of(w_at, lane + n);
            bias[n] = bias_of(w[n]);
            scale[n] = tile_scale(scales, lane + n);
        }
#ifdef SUBGROUP
        const uvec4 mine0 = x[x_from + b * 3], mine1 = x[x_from + b * 3 + 1];
        const uvec2 mine2 = x[x_from + b * 3 + 2].xy;
#endif
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
#ifdef SUBGROUP
            const uvec4 x0 = subgroupShuffle(mine0, m), x1 = subgroupShuffle(mine1, m);
            const uvec2 x2 = subgroupShuffle(mine2, m);
#else
            const uvec4 x0 = x[x_from[m] + b * 3], x1 = x[x_from[m] + b * 3 + 1];
            const uvec2 x2 = x[x_from[m] + b * 3 + 2].xy;
#endif
            [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
                total[m][n] += float(products(x0, x1, x2.y, w[n], bias[n])) * (uintBitsToFloat(x2.x) * scale[n]);
            }
        }
    }
    store(total);
}
