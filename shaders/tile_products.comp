// tile_products: the raw products of each row with the tokens of its own tile, for sampling in it.
//
// x           float [x_rows, columns]; INT: uint [x_rows, columns/32, 12], as quantize_rows left it
// weight      uvec4, tokens part_first .. part_first + part_count - 1 of the vocabulary: weights.glsl
// rows        Row [rows]          of head_finish; rows beyond x_rows take row 0 of x
// tile_begin  uint [tiles + 1]    first token of each tile
// result      float [rows, 256]   written where the token lies in this part
//
// push: columns, x_rows, part_first, part_count; x_at; weight_at, a multiple of 4. INT sums a block exactly, as
// linear_*_int does. Groups: (ceil(256 / WORKGROUP_X), rows); one invocation a token.
// Reference: reference.linear.
//
// variant: tile_products_f32 F32
// variant: tile_products_f16 F16
// variant: tile_products_bf16 BF16
// variant: tile_products_q40 Q40
// variant: tile_products_q80 Q80
// variant: tile_products_q40_int Q40 INT
// variant: tile_products_q80_int Q80 INT
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint weight_at;
    uint columns;
    uint x_rows;
    uint part_first;
    uint part_count;
};

#ifdef INT
layout(std430, binding = 0) readonly buffer X { uint x[]; };
#else
layout(std430, binding = 0) readonly buffer X { float x[]; };
#endif
layout(std430, binding = 1) readonly buffer WeightBuffer { uvec4 weight[]; };

#include "head.glsl"
#include "weights.glsl"

layout(std430, binding = 2) readonly buffer Rows { Row rows[]; };
layout(std430, binding = 3) readonly buffer TileBegin { uint tile_begin[]; };
layout(std430, binding = 4) writeonly buffer Result { float result[]; };

// Columns 4 i .. 4 i + 3 of step `step` of row `row` of x; INT: unscaled.
vec4 x_quad(uint row, uint step, uint i) {
#ifdef INT
    const uint word = x[x_at + (row * (columns / 32) + step) * 12 + i];
    return vec4(word >> 16 & 255u, word >> 24, word & 255u, word >> 8 & 255u) - 128.0;
#else
    const uint column = step * STEP_COLUMNS + 4 * i;
    const uint at = x_at + row * columns + column;
    vec4 values = vec4(0.0);
    for (uint c = 0; c < 4 && column + c < columns; c++) {
        values[c] = x[at + c];
    }
    return values;
#endif
}

float x_scale(uint row, uint step) {
#ifdef INT
    return uintBitsToFloat(x[x_at + (row * (columns / 32) + step) * 12 + 8]);
#else
    return 1.0;
#endif
}

void main() {
    const uint row = gl_WorkGroupID.y;
    const uint from = row < x_rows ? row : 0;
    const uint tile = rows[row].tile;
    const uint token = tile_begin[tile] + gl_GlobalInvocationID.x;
    if (token >= tile_begin[tile + 1] || token < part_first || token - part_first >= part_count) {
        return;
    }
    const uint lane = (token - part_first) % WEIGHT_TILE;
    const uint steps = weight_steps(columns);
    uint at = weight_at / 4 + (token - part_first) / WEIGHT_TILE * steps * STEP_WORDS;
    float total = 0.0;
    for (uint step = 0; step < steps; step++) {
        float sum = 0.0;
        for (uint i = 0; i < STEP_COLUMNS / 4; i++) {
            sum += dot(x_quad(from, step, i), weight_quad(at, lane, i));
        }
        total += sum * (x_scale(from, step) * weight_scale(at, lane));
        at += STEP_WORDS;
    }
    result[row * TILE + gl_GlobalInvocationID.x] = total;
}
