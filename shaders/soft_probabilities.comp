// soft_probabilities: products of the dense rows, in place, to probabilities exp(z - largest) / total.
//
// products  float [row_count, columns]  raw products of tokens first_token .. first_token + tokens - 1, of the rows in
//                                       `dense`, in its order; on return their probabilities
// settings  uint [64]                   see ddllm_vk/backends/vulkan_head.py
// rows      Row [row_count or more]     of head_finish
// dense     int [1 + row_count]         of soft_dense_rows
//
// push: columns, tokens, first_token; products_at. Groups: (ceil(tokens / WORKGROUP_X), row_count).
// Reference: cpu/soft.py soft_embedding.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint products_at;
    uint columns;
    uint tokens;
    uint first_token;
};

layout(std430, binding = 0) buffer Products { float products[]; };
layout(std430, binding = 1) readonly buffer Settings { uint settings[]; };

#define SETTINGS(i) settings[i]
#include "head.glsl"

layout(std430, binding = 2) readonly buffer Rows { Row rows[]; };
layout(std430, binding = 3) readonly buffer Dense { int dense[]; };

void main() {
    const uint t = gl_GlobalInvocationID.x;
    if (t >= tokens || gl_WorkGroupID.y >= uint(dense[0])) {
        return;
    }
    const uint row = uint(dense[1 + gl_WorkGroupID.y]);
    const uint at = products_at + gl_WorkGroupID.y * columns + t;
    products[at] = exp32(token_z(row, first_token + t, products[at]) - rows[row].largest) / rows[row].total;
}
