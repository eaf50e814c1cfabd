// embedding_rows: result[r] = table[ids[r]] * scale, for the ids that lie in this part of the table.
//
// weight  uvec4 [tiles, ...]      tokens first .. first + count - 1 of the table: weights.glsl
// ids     int [rows]              each below the vocabulary
// result  float [rows, columns]   rows of other tokens are left as they are
//
// push: columns; first, count; scale; the _at of every binding, weight_at a multiple of 4. Groups: (rows).
// Reference: table[ids] * scale, table dequantised.
//
// variant: embedding_rows_f32 F32
// variant: embedding_rows_f16 F16
// variant: embedding_rows_bf16 BF16
// variant: embedding_rows_q40 Q40
// variant: embedding_rows_q80 Q80
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint weight_at;
    uint ids_at;
    uint result_at;
    uint columns;
    uint first;
    uint count;
    float scale;
};

layout(std430, binding = 0) readonly buffer WeightBuffer { uvec4 weight[]; };
layout(std430, binding = 1) readonly buffer Ids { int ids[]; };
layout(std430, binding = 2) writeonly buffer Result { float result[]; };

#include "weights.glsl"

void main() {
    const uint token = uint(ids[ids_at + gl_WorkGroupID.x]) - first;
    if (token >= count) {  // also of an id below `first`
        return;
    }
    const uint to = result_at + gl_WorkGroupID.x * columns;
    const uint lane = token % WEIGHT_TILE;
    const uint tile_at = weight_at / 4 + token / WEIGHT_TILE * weight_steps(columns) * STEP_WORDS;
    for (uint quad = gl_LocalInvocationID.x; 4 * quad < columns; quad += gl_WorkGroupSize.x) {
        const uint at = tile_at + 4 * quad / STEP_COLUMNS * STEP_WORDS;
        const vec4 values = weight_quad(at, lane, quad % (STEP_COLUMNS / 4)) * weight_scale(at, lane);
        for (uint c = 0; c < 4 && 4 * quad + c < columns; c++) {
            result[to + 4 * quad + c] = values[c] * scale;
        }
    }
}
