// rms_norm: result = x * (mean(x^2) + eps)^-0.5 * weight, row by row (docs/MODEL.md, Layer).
// add_rms_norm: result = (x + rms_norm(y) * weight) * scale.
//
// x, result  float [rows, columns]     result may be x
// y          float [rows, columns]     add_rms_norm only: what is normed
// weight     float [columns]           not in rms_norm_no_weight, where it is one
//
// push: columns, eps; scale (add_rms_norm); the _at of every binding. Groups: (rows); one workgroup a row.
// Reference: reference.rms_norm, reference.add_rms_norm.
//
// variant: rms_norm WEIGHT
// variant: rms_norm_no_weight
// variant: add_rms_norm WEIGHT ADD
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
#ifdef ADD
    uint y_at;
#endif
#ifdef WEIGHT
    uint weight_at;
#endif
    uint result_at;
    uint columns;
    float eps;
#ifdef ADD
    float scale;
#endif
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Result { float result[]; };
#ifdef WEIGHT
layout(std430, binding = 2) readonly buffer Weight { float weight[]; };
#endif
#ifdef ADD
layout(std430, binding = 3) readonly buffer Y { float y[]; };
#endif

shared float partial[gl_WorkGroupSize.x];

float normed(uint at) {
#ifdef ADD
    return y[y_at + at];
#else
    return x[x_at + at];
#endif
}

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
    const uint row = gl_WorkGroupID.x * columns;
    float squares = 0.0;
    for (uint c = gl_LocalInvocationID.x; c < columns; c += gl_WorkGroupSize.x) {
        const float value = normed(row + c);
        squares += value * value;
    }
    const float factor = inversesqrt(workgroup_sum(squares) / float(columns) + eps);
    for (uint c = gl_LocalInvocationID.x; c < columns; c += gl_WorkGroupSize.x) {
        float value = normed(row + c) * factor;
#ifdef WEIGHT
        value *= weight[weight_at + c];
#endif
#ifdef ADD
        value = (x[x_at + row + c] + value) * scale;
#endif
        result[result_at + row + c] = value;
    }
}
