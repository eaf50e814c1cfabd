// sample_in_tile: the first token of a row's tile, in id order, at which the sum of exp(z - largest) exceeds the row's
// residual; the last one of nonzero probability if rounding leaves none.
//
// products    float [rows, 256]   of tile_products: raw products of the row's own tile
// settings    uint [64]           see ddllm_vk/backends/vulkan_head.py
// rows        Row [rows]          of head_finish
// tile_begin  uint [tiles + 1]    first token of each tile
// sampled     int [rows]
//
// push: row_count. Groups: (row_count / WORKGROUP_X, up); one invocation a row. Reference: cpu/head.py sample_in_tile.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 32, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint row_count;
};

layout(std430, binding = 0) readonly buffer Products { float products[]; };
layout(std430, binding = 1) readonly buffer Settings { uint settings[]; };

#define SETTINGS(i) settings[i]
#include "head.glsl"
#include "twofloat.glsl"

layout(std430, binding = 2) readonly buffer Rows { Row rows[]; };
layout(std430, binding = 3) readonly buffer TileBegin { uint tile_begin[]; };
layout(std430, binding = 4) writeonly buffer Sampled { int sampled[]; };

void main() {
    const uint row = gl_GlobalInvocationID.x;
    if (row >= row_count) {
        return;
    }
    const Row stats = rows[row];
    const uint begin = tile_begin[stats.tile], count = tile_begin[stats.tile + 1] - begin;
    int token = int(begin);
    vec2 passed = vec2(0.0);
    for (uint j = 0; j < count; j++) {
        const float e = exp32(token_z(row, begin + j, products[row * TILE + j]) - stats.largest);
        if (e > 0.0) {
            token = int(begin + j);
            passed = two_add(passed, e);
            if (greater(passed, vec2(stats.residual, stats.residual_low))) {
                break;
            }
        }
    }
    sampled[row] = token;
}
