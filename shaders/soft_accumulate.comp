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
// SUBGROUP: each invocation of a subgroup reads another row of p and hands it to the others; subgroups have at least
// TILE_ROWS invocations.
//
// variant: soft_accumulate_f32 F32
// variant: soft_accumulate_f32_subgroup F32 SUBGROUP
// variant: soft_accumulate_f16 F16
// variant: soft_accumulate_f16_subgroup F16 SUBGROUP
// variant: soft_accumulate_bf16 BF16
// variant: soft_accumulate_bf16_subgroup BF16 SUBGROUP
// variant: soft_accumulate_q40 Q40
// variant: soft_accumulate_q40_subgroup Q40 SUBGROUP
// variant: soft_accumulate_q80 Q80
// variant: soft_accumulate_q80_subgroup Q80 SUBGROUP
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

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

// The scale of row `row` of a tile; one word is read, not the 8 that weight_scale takes.
float scale_of(uint at, uint row) {
#if defined(Q40) || defined(Q80)
    return unpackHalf2x16(weight[at + row / 8][row / 2 & 3] >> (row & 1) * 16).x;
#else
    return 1.0;
#endif
}

void main() {
    const uint row_count = uint(dense[0]);
    const uint row0 = gl_WorkGroupID.y * TILE_ROWS;
    if (row0 >= row_count) {
        return;
    }
    const uint column0 = 4 * gl_GlobalInvocationID.x;
    const uint column = min(column0, (columns - 1) / 4 * 4);  // beyond the matrix: the last ones, and nothing is written
    const uint steps = weight_steps(columns);
    const uint quad = column % STEP_COLUMNS / 4;
    uint at = weight_at / 4 + column / STEP_COLUMNS * STEP_WORDS;
#ifdef SUBGROUP
    const uint p_from = p_at + min(row0 + gl_SubgroupInvocationID % TILE_ROWS, row_count - 1) * stride;
#else
    uint p_from[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        p_from[m] = p_at + min(row0 + m, row_count - 1) * stride;
    }
#endif
    vec4 total[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        total[m] = vec4(0.0);
    }
    for (uint token = 0; token < tokens; token++) {
        const uint lane = token % WEIGHT_TILE;
        const vec4 values = scale_of(at, lane) * weight_quad(at, lane, quad);
#ifdef SUBGROUP
        const float mine = p[p_from + token];
#endif
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
#ifdef SUBGROUP
            total[m] += subgroupShuffle(mine, m) * values;
#else
            total[m] += p[p_from[m] + token] * values;
#endif
        }
        at += lane == WEIGHT_TILE - 1 ? steps * STEP_WORDS : 0;
    }
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        if (row0 + m < row_count) {
            for (uint c = 0; c < 4 && column0 + c < columns; c++) {
                const uint to = (row0 + m) * columns + column0 + c;
                sums[to] = first_token == 0 ? total[m][c] : sums[to] + total[m][c];
            }
        }
    }
}
