// add: result = x + y.
//
// x, y, result  float [count]     result may be x or y
//
// push: count; the _at of every binding. Groups: (any); they share the work. Reference: x + y.
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint y_at;
    uint result_at;
    uint count;
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Y { float y[]; };
layout(std430, binding = 2) writeonly buffer Result { float result[]; };

void main() {
    const uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += step) {
        result[result_at + i] = x[x_at + i] + y[y_at + i];
    }
}
