// head_norm_rope: RMS norm of each head of each row, times weight, then RoPE on the pairs (d, d + size/2).
// head_norm: without the rotation. *_no_weight: the weight is one.
//
// x, result  float [rows, heads, size]    result may be x
// weight     float [size]
// rope       float [2, rows, size/2]      cosines, then sines
//
// push: heads, size (even with rope), eps; rows (with rope); the _at of every binding. Groups: (heads, rows); one workgroup a head.
// Reference: reference.head_norm_rope.
//
// variant: head_norm_rope WEIGHT ROPE
// variant: head_norm_rope_no_weight ROPE
// variant: head_norm WEIGHT
// variant: head_norm_no_weight
#version 450

layout(local_size_x = 32, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint result_at;
#ifdef WEIGHT
    uint weight_at;
#endif
#ifdef ROPE
    uint rope_at;
#endif
#ifdef ROPE
    uint rows;
#endif
    uint heads;
    uint size;
    float eps;
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Result { float result[]; };
#ifdef WEIGHT
layout(std430, binding = 2) readonly buffer Weight { float weight[]; };
#endif
#ifdef ROPE
#ifdef WEIGHT
layout(std430, binding = 3) readonly buffer Rope { float rope[]; };
#else
layout(std430, binding = 2) readonly buffer Rope { float rope[]; };
#endif
#endif

shared float partial[gl_WorkGroupSize.x];

// The sum of `value` over the workgroup, added in pairs: no order depends on the device.
float workgroup_sum(float value) {
    const uint me = gl_LocalInvocationID.x;
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

void main() {
    const uint row = gl_WorkGroupID.y;
    const uint at = (row * heads + gl_WorkGroupID.x) * size;
    float squares = 0.0;
    for (uint d = gl_LocalInvocationID.x; d < size; d += gl_WorkGroupSize.x) {
        const float value = x[x_at + at + d];
        squares += value * value;
    }
    const float factor = inversesqrt(workgroup_sum(squares) / float(size) + eps);
#ifdef ROPE
    const uint half_size = size / 2;
    for (uint d = gl_LocalInvocationID.x; d < half_size; d += gl_WorkGroupSize.x) {
        float a = x[x_at + at + d] * factor;
        float b = x[x_at + at + d + half_size] * factor;
#ifdef WEIGHT
        a *= weight[weight_at + d];
        b *= weight[weight_at + d + half_size];
#endif
        const float c = rope[rope_at + row * half_size + d];
        const float s = rope[rope_at + (rows + row) * half_size + d];
        result[result_at + at + d] = a * c - b * s;
        result[result_at + at + d + half_size] = b * c + a * s;
    }
#else
    for (uint d = gl_LocalInvocationID.x; d < size; d += gl_WorkGroupSize.x) {
        float value = x[x_at + at + d] * factor;
#ifdef WEIGHT
        value *= weight[weight_at + d];
#endif
        result[result_at + at + d] = value;
    }
#endif
}
