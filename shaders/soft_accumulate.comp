// soft_accumulate: sums += p @ weight, for a chunk of the vocabulary; sums = p @ weight for its first.
//
// p       float [row_count, stride]      probabilities of tokens first_token .. first_token + tokens - 1
// weight  uvec4, the same tokens as rows of `columns`: weights.glsl
// dense   int [1 + row_count]            of soft_dense_rows: its first word is how many rows there are
// sums    float [row_count, columns]
//
// push: stride, tokens, columns, first_token; p_at; weight_at, a multiple of 4. Groups: (ceil(ceil(columns / 4) /
// WORKGROUP_X), ceil(row_count / TILE_ROWS)); an invocation makes TILE_ROWS rows of 4 columns; those beyond the rows
// there are leave at once. Reference: cpu/soft.py soft_embedding.
//
// variant: soft_accumulate_f32 F32
// variant: soft_accumulate_f16 F16
// variant: soft_accumulate_bf16 BF16
// variant: soft_accumulate_q40 Q40
// variant: soft_accumulate_q80 Q80
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint TILE_ROWS = 8;

layout(push_constant) uniform Push {
    uint p_at;
    uint weight_at;
    uint stride;
    uint tokens;
    uint columns;
    uint first_token;
};

layout(std430, binding = 0) readonly buffer P { float p[]; };
layout(std430, binding = 1) readonly buffer WeightBuffer { uvec4 weight[]; };
layout(std430, binding = 2) readonly buffer Dense { int dense[]; };
layout(std430, binding = 3) buffer Sums { float sums[]; };

#include "weights.glsl"

void main() {
    const uint row_count = uint(dense[0]);
    const uint row0 = gl_WorkGroupID.y * TILE_ROWS;
    const uint column = 4 * gl_GlobalInvocationID.x;
    if (row0 >= row_count || column >= columns) {
        return;
    }
    const uint steps = weight_steps(columns);
    const uint quad = column % STEP_COLUMNS / 4;
    uint at = weight_at / 4 + column / STEP_COLUMNS * STEP_WORDS;
    uint p_from[TILE_ROWS];
    vec4 total[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        p_from[m] = p_at + min(row0 + m, row_count - 1) * stride;
        total[m] = vec4(0.0);
    }
    for (uint begin = 0; begin < tokens; begin += WEIGHT_TILE) {
        for (uint lane = 0; lane < min(WEIGHT_TILE, tokens - begin); lane++) {
            const vec4 values = weight_scale(at, lane) * weight_quad(at, lane, quad);
            [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
                total[m] += p[p_from[m] + begin + lane] * values;
            }
        }
        at += steps * STEP_WORDS;
    }
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        if (row0 + m < row_count) {
            for (uint c = 0; c < 4 && column + c < columns; c++) {
                const uint to = (row0 + m) * columns + column + c;
                sums[to] = first_token == 0 ? total[m][c] : sums[to] + total[m][c];
            }
        }
    }
}
