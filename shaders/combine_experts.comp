// combine_experts: result[r] = sum over j of weights[r, j] * y[places[r, j]]: the experts' outputs of a row, weighted.
//
// y        float [rows * top_k, columns]    by expert, as experts_linear leaves it
// places   uint [rows, top_k]               of group_experts
// weights  float [rows, top_k]              of router
// result   float [rows, columns]
//
// push: columns, top_k; the _at of every binding. Groups: (ceil(columns / WORKGROUP_X), rows).
// Reference: reference.experts, its last line.
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint y_at;
    uint places_at;
    uint weights_at;
    uint result_at;
    uint columns;
    uint top_k;
};

layout(std430, binding = 0) readonly buffer Y { float y[]; };
layout(std430, binding = 1) readonly buffer Places { uint places[]; };
layout(std430, binding = 2) readonly buffer Weights { float weights[]; };
layout(std430, binding = 3) writeonly buffer Result { float result[]; };

void main() {
    const uint column = gl_GlobalInvocationID.x, row = gl_WorkGroupID.y;
    if (column >= columns) {
        return;
    }
    float sum = 0.0;
    for (uint j = 0; j < top_k; j++) {
        const uint pair = row * top_k + j;
        sum += weights[weights_at + pair] * y[y_at + places[places_at + pair] * columns + column];
    }
    result[result_at + row * columns + column] = sum;
}
