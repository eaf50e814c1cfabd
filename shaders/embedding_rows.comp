// embedding_rows: result[r] = table[ids[r]] * scale.
//
// table   a Q40, Q80 or float32 matrix [vocabulary, columns], blocks as in a file (ddllm_vk/quants.py)
// ids     int [rows], each below the vocabulary
// result  float [rows, columns]
//
// push: columns, a multiple of 32 if quantised; scale; the _at of every binding. Groups: (rows).
// Reference: table[ids] * scale, table dequantised.
//
// variant: embedding_rows_f32
// variant: embedding_rows_q40 Q40
// variant: embedding_rows_q80 Q80
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint table_at;
    uint ids_at;
    uint result_at;
    uint columns;
    float scale;
};

layout(std430, binding = 0) readonly buffer Table { uint table[]; };
layout(std430, binding = 1) readonly buffer Ids { int ids[]; };
layout(std430, binding = 2) writeonly buffer Result { float result[]; };

#define WEIGHT_WORD(i) table[table_at + (i)]
#include "blocks.glsl"

float entry(uint id, uint c) {
#if defined(Q40)
    const uint block = (id * (columns / BLOCK) + c / BLOCK) * Q40_BYTES;
    return float(q40_weight(block, c % BLOCK)) * block_scale(block);
#elif defined(Q80)
    const uint block = (id * (columns / BLOCK) + c / BLOCK) * Q80_BYTES;
    return float(q80_weight(block, c % BLOCK)) * block_scale(block);
#else
    return uintBitsToFloat(WEIGHT_WORD(id * columns + c));
#endif
}

void main() {
    const uint row = gl_WorkGroupID.x;
    const uint id = uint(ids[ids_at + row]);
    for (uint c = gl_LocalInvocationID.x; c < columns; c += gl_WorkGroupSize.x) {
        result[result_at + row * columns + c] = entry(id, c) * scale;
    }
}
