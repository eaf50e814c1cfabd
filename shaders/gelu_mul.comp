// gelu_mul: result = gelu(gate) * up, GELU's tanh approximation.
//
// gate, up  float [rows, stride]     columns 0 .. columns - 1 of each row; they may be parts of one matrix
// result    float [rows, columns]
//
// push: columns, stride, count = rows * columns; the _at of every binding. Groups: (any); they share the work.
// Reference: reference.gelu_mul.
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint gate_at;
    uint up_at;
    uint result_at;
    uint columns;
    uint stride;
    uint count;
};

layout(std430, binding = 0) readonly buffer Gate { float gate[]; };
layout(std430, binding = 1) readonly buffer Up { float up[]; };
layout(std430, binding = 2) writeonly buffer Result { float result[]; };

// x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), which has no overflow that matters: exp gives infinity where tanh is -1.
float gelu(float x) {
    return x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
}

void main() {
    const uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += step) {
        const uint at = i / columns * stride + i % columns;
        result[result_at + i] = gelu(gate[gate_at + at]) * up[up_at + at];
    }
}
