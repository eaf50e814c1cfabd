// head_tiles: for each row and each tile of a chunk of the vocabulary: maximum, its lowest token, sum of e = exp(z -
// maximum) and of e * (z - maximum); z = softcap * tanh(product / softcap) / temperature, -infinity where forbidden.
//
// products  float [product_rows, columns]  raw products of tokens first_token .. first_token + tokens - 1
// settings  uint [64]                      see ddllm_vk/backends/vulkan_head.py
// tiles     Tile [rows, tile_count]        head.glsl; written from column first_tile on
//
// A row beyond product_rows is row 0 once more: with ids forbidden, for sampling, beside row 0 as it is.
// push: columns, tokens, first_token, first_tile, tile_count, product_rows; products_at. Groups: (tiles of the chunk,
// rows); one workgroup a tile. Reference: cpu/head.py head_chunk.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint products_at;
    uint columns;
    uint tokens;
    uint first_token;
    uint first_tile;
    uint tile_count;
    uint product_rows;
};

layout(std430, binding = 0) readonly buffer Products { float products[]; };
layout(std430, binding = 1) readonly buffer Settings { uint settings[]; };

#define SETTINGS(i) settings[i]
#include "head.glsl"

layout(std430, binding = 2) writeonly buffer Tiles { Tile tiles[]; };

shared float z[TILE];  // each invocation reads only what it wrote
shared float largest[gl_WorkGroupSize.x];
shared uint lowest_token[gl_WorkGroupSize.x];
shared float totals[gl_WorkGroupSize.x];
shared float slopes[gl_WorkGroupSize.x];
shared uint broken;

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.y;
    const uint begin = gl_WorkGroupID.x * TILE;
    const uint end = min(begin + TILE, tokens);
    const uint at = products_at + (row < product_rows ? row : 0) * columns;
    if (me == 0) {
        broken = 0;
    }
    barrier();

    float top = MINUS_INFINITY;
    uint top_token = first_token + begin;
    for (uint i = begin + me; i < end; i += gl_WorkGroupSize.x) {
        const float value = token_z(row, first_token + i, products[at + i]);
        const uint bits = floatBitsToUint(value);
        if ((bits & 0x7FFFFFFFu) > 0x7F800000u || bits == 0x7F800000u) {
            broken = 1;
        }
        z[i - begin] = value;
        if (value > top) {
            top = value;
            top_token = first_token + i;
        }
    }
    largest[me] = top;
    lowest_token[me] = top_token;
    barrier();
    for (uint width = gl_WorkGroupSize.x; width > 1;) {
        const uint half_width = (width + 1) / 2;
        if (me + half_width < width) {
            const float other = largest[me + half_width];
            const uint other_token = lowest_token[me + half_width];
            if (other > largest[me] || (other == largest[me] && other_token < lowest_token[me])) {
                largest[me] = other;
                lowest_token[me] = other_token;
            }
        }
        width = half_width;
        barrier();
    }
    top = largest[0];

    float total = 0.0, slope = 0.0;
    if (top > MINUS_INFINITY) {
        for (uint i = begin + me; i < end; i += gl_WorkGroupSize.x) {
            const float below = z[i - begin] - top;
            const float e = exp32(below);
            total += e;
            slope += e > 0.0 ? e * below : 0.0;
        }
    }
    totals[me] = total;
    slopes[me] = slope;
    barrier();
    for (uint width = gl_WorkGroupSize.x; width > 1;) {
        const uint half_width = (width + 1) / 2;
        if (me + half_width < width) {
            totals[me] += totals[me + half_width];
            slopes[me] += slopes[me + half_width];
        }
        width = half_width;
        barrier();
    }
    if (me == 0) {
        const int argmax = broken == 0 ? int(lowest_token[0]) : BROKEN;
        tiles[row * tile_count + first_tile + gl_WorkGroupID.x] = Tile(top, totals[0], slopes[0], argmax);
    }
}
