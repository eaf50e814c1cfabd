// append_row: x, and a copy of one of its rows behind it.
//
// x       float [rows, columns]
// result  float [rows + 1, columns]
//
// push: rows, columns, row; the _at of every binding. Groups: (any); they share the work.
// Reference: concatenate([x, x[row : row + 1]]).
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint result_at;
    uint rows;
    uint columns;
    uint row;
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Result { float result[]; };

void main() {
    const uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    const uint count = rows * columns;
    for (uint i = gl_GlobalInvocationID.x; i < count + columns; i += step) {
        result[result_at + i] = x[x_at + (i < count ? i : row * columns + i - count)];
    }
}
