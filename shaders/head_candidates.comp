// head_candidates: appends, in id order, the tokens of a chunk of the vocabulary that may matter for a row's
// self-conditioning embedding: those above the row's maximum so far less 22, and above the z up to which tokens were
// left out. A full list drops about half: the smaller ones, with all others up to the same z.
//
// products    float [row_count, columns]   raw products of tokens first_token .. first_token + tokens - 1
// settings    uint [64]                    see ddllm_vk/backends/vulkan_head.py
// tiles       Tile [rows, tile_count]      of head_tiles, for this chunk
// candidates  uint [row_count, CAPACITY, 2]  token, bits of z
// lists       List [row_count]             head.glsl; begun anew where first_tile is 0
//
// push: columns, tokens, first_token, first_tile, tile_count; products_at. Groups: (row_count); one workgroup a row.
// CAPACITY: at most 1024, at least 2. Reference: cpu/head.py head_chunk.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint CAPACITY = 1024;

layout(push_constant) uniform Push {
    uint products_at;
    uint columns;
    uint tokens;
    uint first_token;
    uint first_tile;
    uint tile_count;
};

layout(std430, binding = 0) readonly buffer Products { float products[]; };
layout(std430, binding = 1) readonly buffer Settings { uint settings[]; };

#define SETTINGS(i) settings[i]
#include "head.glsl"

layout(std430, binding = 2) readonly buffer Tiles { Tile tiles[]; };
layout(std430, binding = 3) buffer Candidates { uvec2 candidates[]; };
layout(std430, binding = 4) buffer Lists { List lists[]; };

shared uvec2 list[CAPACITY];
shared float z[TILE];
shared uint counts[gl_WorkGroupSize.x];

// Afterwards counts[i] is the sum of `count` over invocations 0..i.
void add_up(uint count) {
    const uint me = gl_LocalInvocationID.x;
    barrier();  // the counts before have been read
    counts[me] = count;
    barrier();
    for (uint distance = 1; distance < gl_WorkGroupSize.x; distance *= 2) {
        const uint other = me >= distance ? counts[me - distance] : 0;
        barrier();
        counts[me] += other;
        barrier();
    }
}

// How many of the list's and the tile's z are above `limit`.
uint above(float limit, uint kept) {
    uint count = 0;
    for (uint i = gl_LocalInvocationID.x; i < kept; i += gl_WorkGroupSize.x) {
        count += uintBitsToFloat(list[i].y) > limit ? 1 : 0;
    }
    for (uint i = gl_LocalInvocationID.x; i < TILE; i += gl_WorkGroupSize.x) {
        count += z[i] > limit ? 1 : 0;
    }
    add_up(count);
    return counts[gl_WorkGroupSize.x - 1];
}

// Keeps what is above `limit`, in order; returns how many. A round reads before it writes, and writes no further on.
uint compact(float limit, uint kept) {
    const uint me = gl_LocalInvocationID.x;
    uint left = 0;
    for (uint begin = 0; begin < kept; begin += gl_WorkGroupSize.x) {
        const uvec2 entry = list[min(begin + me, kept - 1)];
        const bool keep = begin + me < kept && uintBitsToFloat(entry.y) > limit;
        add_up(keep ? 1 : 0);
        if (keep) {
            list[left + counts[me] - 1] = entry;
        }
        left += counts[gl_WorkGroupSize.x - 1];
    }
    return left;
}

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.x;
    List state = List(0, MINUS_INFINITY, MINUS_INFINITY);
    if (first_tile != 0) {
        state = lists[row];
    }
    bool loaded = false;
    const uint run = (TILE + gl_WorkGroupSize.x - 1) / gl_WorkGroupSize.x;  // neighbouring tokens of one invocation
    for (uint begin = 0; begin < tokens; begin += TILE) {
        const float top = tiles[row * tile_count + first_tile + begin / TILE].largest;
        state.largest = max(state.largest, top);
        float limit = max(state.lowest, state.largest - DEPTH);
        if (!(top > limit)) {
            continue;
        }
        barrier();  // z and the list of the tile before have been read
        if (!loaded) {
            for (uint i = me; i < state.kept; i += gl_WorkGroupSize.x) {
                list[i] = candidates[row * CAPACITY + i];
            }
            loaded = true;
        }
        for (uint i = me; i < TILE; i += gl_WorkGroupSize.x) {
            const uint t = begin + i;
            z[i] = t < tokens ? token_z(row, first_token + t, products[products_at + row * columns + t])
                              : MINUS_INFINITY;
        }
        barrier();
        if (state.kept + above(limit, 0) > CAPACITY) {
            float low = limit, high = state.largest;
            for (uint i = 0; i < 40; i++) {
                const float middle = 0.5 * (low + high);
                const uint count = above(middle, state.kept);
                if (count > CAPACITY / 2) {
                    low = middle;
                } else {
                    high = middle;
                    if (count >= CAPACITY / 4) {
                        break;
                    }
                }
            }
            limit = high;
            state.lowest = high;
            state.kept = compact(high, state.kept);
        }
        uint count = 0;
        for (uint i = me * run; i < min(me * run + run, TILE); i++) {
            count += z[i] > limit ? 1 : 0;
        }
        add_up(count);
        uint at = state.kept + counts[me] - count;
        for (uint i = me * run; i < min(me * run + run, TILE); i++) {
            if (z[i] > limit) {
                list[at] = uvec2(first_token + begin + i, floatBitsToUint(z[i]));
                at++;
            }
        }
        state.kept += counts[gl_WorkGroupSize.x - 1];
    }
    barrier();
    if (loaded) {
        for (uint i = me; i < state.kept; i += gl_WorkGroupSize.x) {
            candidates[row * CAPACITY + i] = list[i];
        }
    }
    if (me == 0) {
        lists[row] = state;
    }
}
