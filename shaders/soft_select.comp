// soft_select: which of a row's candidates make its self-conditioning embedding, with their probabilities; or that the
// row needs the dense product, because what they leave out is not small enough (cpu/head.py, DROPPED_*).
//
// rows        Row [row_count]                of head_finish
// lists       List [row_count]               of head_candidates
// candidates  uint [row_count, CAPACITY, 2]  token, bits of z; on return the first soft.count: token, bits of its
//                                            probability
// soft        Soft [row_count]               head.glsl; `dense` is SPARSE or, for soft_dense_rows to settle, 0
//
// push: wanted, allowed: bounds of the 2-norm of the probabilities left out: wanted if it can be had, else allowed.
// Groups: (row_count); one workgroup a row. Reference: cpu/head.py finish.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint CAPACITY = 1024;

layout(push_constant) uniform Push {
    float wanted;
    float allowed;
};

#include "head.glsl"
#include "twofloat.glsl"

layout(std430, binding = 0) readonly buffer Rows { Row rows[]; };
layout(std430, binding = 1) readonly buffer Lists { List lists[]; };
layout(std430, binding = 2) buffer Candidates { uvec2 candidates[]; };
layout(std430, binding = 3) writeonly buffer SoftRows { Soft soft[]; };

shared float e[CAPACITY];
shared uint tokens[CAPACITY];
shared float partial[gl_WorkGroupSize.x];
shared uint counts[gl_WorkGroupSize.x];

float workgroup_sum(float value) {
    const uint me = gl_LocalInvocationID.x;
    barrier();  // the sum before has been read
    partial[me] = value;
    barrier();
    for (uint width = gl_WorkGroupSize.x; width > 1;) {
        const uint half_width = (width + 1) / 2;
        if (me + half_width < width) {
            partial[me] += partial[me + half_width];
        }
        width = half_width;
        barrier();
    }
    return partial[0];
}

// The sum of the candidates' e that are below `limit`.
float sum_below(float limit, uint kept) {
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < kept; i += gl_WorkGroupSize.x) {
        sum += e[i] < limit ? e[i] : 0.0;
    }
    return workgroup_sum(sum);
}

// About the highest e below which all can be left out (0: none of the candidates), or -1: too much is missing already.
float threshold(float bound, float outside, float highest_outside, uint kept) {
    if (sqrt(highest_outside) * sqrt(outside) > bound) {
        return -1.0;
    }
    float low = 0.0, high = 1.0;
    for (uint i = 0; i < 40 && high > 1.05 * low; i++) {
        const float middle = low > 0.0 ? sqrt(low * high) : 0.125 * high;
        const float rest = outside + sum_below(middle, kept);
        if (sqrt(max(middle, highest_outside)) * sqrt(rest) <= bound) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint base = gl_WorkGroupID.x * CAPACITY;
    const Row stats = rows[gl_WorkGroupID.x];
    const List list = lists[gl_WorkGroupID.x];
    vec2 own = vec2(0.0);
    for (uint i = me; i < list.kept; i += gl_WorkGroupSize.x) {
        const uvec2 candidate = candidates[base + i];
        tokens[i] = candidate.x;
        e[i] = exp32(uintBitsToFloat(candidate.y) - stats.largest);
        own = two_add(own, e[i]);
    }
    const float inside = workgroup_sum(own.x), inside_low = workgroup_sum(own.y);
    const float outside = max(0.0, (stats.total - inside) + (stats.total_low - inside_low));
    const float highest_outside = max(exp32(list.lowest - stats.largest), exp32(-DEPTH));
    float limit = threshold(wanted * stats.total, outside, highest_outside, list.kept);
    if (limit < 0.0) {
        limit = threshold(allowed * stats.total, outside, highest_outside, list.kept);
    }
    if (limit < 0.0) {
        if (me == 0) {
            soft[gl_WorkGroupID.x] = Soft(0.0, 0, 0);
        }
        return;
    }
    const float dropped = (outside + sum_below(limit, list.kept)) / stats.total;

    uint left = 0;
    for (uint begin = 0; begin < list.kept; begin += gl_WorkGroupSize.x) {
        const uint i = begin + me;
        const bool keep = i < list.kept && e[min(i, CAPACITY - 1)] >= limit;
        counts[me] = keep ? 1 : 0;
        barrier();
        uint before = 0, all = 0;
        for (uint k = 0; k < gl_WorkGroupSize.x; k++) {
            before += k < me ? counts[k] : 0;
            all += counts[k];
        }
        if (keep) {
            candidates[base + left + before] = uvec2(tokens[i], floatBitsToUint(e[i] / stats.total));
        }
        left += all;
        barrier();  // counts have been read
    }
    if (me == 0) {
        soft[gl_WorkGroupID.x] = Soft(dropped, left, SPARSE);
    }
}
