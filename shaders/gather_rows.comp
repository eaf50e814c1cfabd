// gather_rows: the rows that `dense` lists, one after the other: result[i] = source[dense[1 + i]], i < dense[0].
//
// source  uint [any, words]    rows of 32-bit words: floats, or what quantize_rows wrote
// dense   int [1 + most]       of soft_dense_rows
// result  uint [most, words]
//
// push: words; source_at, result_at. Groups: (most); one workgroup a row. Reference: source[dense[1:][:dense[0]]].
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint source_at;
    uint result_at;
    uint words;
};

layout(std430, binding = 0) readonly buffer Source { uint source[]; };
layout(std430, binding = 1) readonly buffer Dense { int dense[]; };
layout(std430, binding = 2) writeonly buffer Result { uint result[]; };

void main() {
    const uint i = gl_WorkGroupID.x;
    if (i >= uint(dense[0])) {
        return;
    }
    const uint from = source_at + uint(dense[1 + i]) * words;
    for (uint w = gl_LocalInvocationID.x; w < words; w += gl_WorkGroupSize.x) {
        result[result_at + i * words + w] = source[from + w];
    }
}
