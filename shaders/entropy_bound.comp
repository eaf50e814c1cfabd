// entropy_bound: which rows take their sampled token, the canvas of the next step, and whether this canvas is settled.
// Every decision is exactly that of ddllm_vk/sampler.py: entropies are multiples of 2^-32, so their sums, kept here as
// 64-bit integers, are the ones that float64 gives there.
//
// rows      Row [row_count or more]   of head_finish
// sampled   int [row_count or more]
// renoise   int [row_count]           ids for the rows that are not accepted
// settings  uint [64]                 see ddllm_vk/backends/vulkan_head.py
// state     int [1 + row_count]       how often in a row the argmax canvas stayed as it was, and that canvas
// canvas    int [row_count]           input of the next step
// record    uint [3 + 5 * row_count]  settled, broken, rows accepted; then argmax, sampled, canvas, entropy (bits of a
//                                     float), accepted, row_count each
//
// push: row_count; first_row: where the statistics of canvas row 0 are (row_count: those with ids forbidden);
// record_at. Groups: (1). Reference: ddllm_vk/sampler.py accept, is_settled.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint record_at;
    uint row_count;
    uint first_row;
};

layout(std430, binding = 0) readonly buffer Settings { uint settings[]; };
#define SETTINGS(i) settings[i]
#include "head.glsl"

layout(std430, binding = 1) readonly buffer Rows { Row rows[]; };
layout(std430, binding = 2) readonly buffer Sampled { int sampled[]; };
layout(std430, binding = 3) readonly buffer Renoise { int renoise[]; };
layout(std430, binding = 4) buffer State { int state[]; };
layout(std430, binding = 5) writeonly buffer Canvas { int canvas[]; };
layout(std430, binding = 6) writeonly buffer Record { uint record[]; };

shared uvec2 sums[gl_WorkGroupSize.x];
shared uint accepted_counts[gl_WorkGroupSize.x];
shared uint changed;
shared uint broken;

// 64-bit unsigned, low word first.
uvec2 add64(uvec2 a, uvec2 b) {
    const uint low = a.x + b.x;
    return uvec2(low, a.y + b.y + (low < a.x ? 1 : 0));
}

bool less64(uvec2 a, uvec2 b) {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

uint source(uint row) {
    return row == 0 ? first_row : row;
}

// Entropies of 0 and more are ordered as their bits.
uint entropy_bits(uint row) {
    return floatBitsToUint(rows[source(row)].entropy);
}

// In units of 2^-32 nats.
uvec2 fixed_point(uint bits) {
    const float value = uintBitsToFloat(bits);
    const float whole = floor(value);
    return uvec2(uint((value - whole) * 4294967296.0), uint(whole));
}

void main() {
    const uint me = gl_LocalInvocationID.x;
    if (me == 0) {
        changed = 0;
        broken = 0;
    }
    barrier();

    const uvec2 bound = uvec2(settings[4], settings[5]);
    const bool first_step = settings[9] != 0;
    uvec2 sum = uvec2(0);
    uint count = 0;
    for (uint row = me; row < row_count; row += gl_WorkGroupSize.x) {
        const uint own = entropy_bits(row);
        if (own >= 0x7F800000u) {
            broken = 1;
        } else {
            sum = add64(sum, fixed_point(own));
        }
        // the entropies that come before this row's: smaller ones, and equal ones of rows above
        uvec2 before = uvec2(0);
        bool is_first = true;
        for (uint other = 0; other < row_count; other++) {
            const uint bits = entropy_bits(other);
            if (bits < own || (bits == own && other < row)) {
                is_first = false;
                before = add64(before, fixed_point(bits));
            }
        }
        const bool accepted = is_first || less64(before, bound);
        const int argmax = rows[source(row)].argmax;
        const int token = sampled[source(row)];
        const int next = accepted ? token : renoise[row];
        if (first_step || state[1 + row] != argmax) {
            changed = 1;
        }
        state[1 + row] = argmax;
        canvas[row] = next;
        count += accepted ? 1 : 0;
        record[record_at + 3 + row] = uint(argmax);
        record[record_at + 3 + row_count + row] = uint(token);
        record[record_at + 3 + 2 * row_count + row] = uint(next);
        record[record_at + 3 + 3 * row_count + row] = own;
        record[record_at + 3 + 4 * row_count + row] = accepted ? 1 : 0;
    }
    sums[me] = sum;
    accepted_counts[me] = count;
    barrier();
    if (me == 0) {
        for (uint i = 1; i < gl_WorkGroupSize.x; i++) {
            sum = add64(sum, sums[i]);
            count += accepted_counts[i];
        }
        const int run = changed != 0 ? 0 : state[0] + 1;
        state[0] = run;
        const bool confident = less64(sum, uvec2(settings[6], settings[7]));
        record[record_at + 0] = broken == 0 && confident && uint(run) >= settings[8] ? 1 : 0;
        record[record_at + 1] = broken;
        record[record_at + 2] = count;
    }
}
