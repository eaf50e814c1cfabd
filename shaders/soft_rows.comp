// soft_rows: result[r] = scale * (sum of probability * weight[token] over the row's candidates + dropped * mean), or
// scale * the row's dense sum. With a table in several parts: one dispatch for each, in order, adding up.
//
// weight      uvec4, tokens part_first .. part_first + part_count - 1 of the vocabulary: weights.glsl
// candidates  uint [row_count, capacity, 2]  of soft_select: token, bits of its probability
// soft        Soft [row_count]               head.glsl
// mean        float [columns]                mean row of the whole table
// sums        float [row_count, columns]     of soft_accumulate
// result      float [row_count, columns]
//
// push: columns, capacity, part_first, part_count, scale; weight_at, a multiple of 4; mean_at, result_at.
// Groups: (ceil(ceil(columns / 4) / WORKGROUP_X), row_count); one invocation 4 columns.
// Reference: cpu/soft.py soft_embedding, sparse_rows.
//
// variant: soft_rows_f32 F32
// variant: soft_rows_f16 F16
// variant: soft_rows_bf16 BF16
// variant: soft_rows_q40 Q40
// variant: soft_rows_q80 Q80
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint weight_at;
    uint mean_at;
    uint result_at;
    uint columns;
    uint capacity;
    uint part_first;
    uint part_count;
    float scale;
};

layout(std430, binding = 0) readonly buffer WeightBuffer { uvec4 weight[]; };

#include "head.glsl"
#include "weights.glsl"

layout(std430, binding = 1) readonly buffer Candidates { uvec2 candidates[]; };
layout(std430, binding = 2) readonly buffer SoftRows { Soft soft[]; };
layout(std430, binding = 3) readonly buffer Mean { float mean[]; };
layout(std430, binding = 4) readonly buffer Sums { float sums[]; };
layout(std430, binding = 5) buffer Result { float result[]; };

void main() {
    const uint row = gl_WorkGroupID.y;
    const uint column = 4 * gl_GlobalInvocationID.x;
    if (column >= columns) {
        return;
    }
    const Soft info = soft[row];
    const uint steps = weight_steps(columns);
    const uint step = column / STEP_COLUMNS, quad = column % STEP_COLUMNS / 4;
    vec4 total = vec4(0.0);
    if (info.dense == SPARSE) {
        for (uint i = 0; i < info.count; i++) {
            const uvec2 candidate = candidates[row * capacity + i];
            if (candidate.x < part_first || candidate.x - part_first >= part_count) {
                continue;
            }
            const uint token = candidate.x - part_first, lane = token % WEIGHT_TILE;
            const uint at = weight_at / 4 + (token / WEIGHT_TILE * steps + step) * STEP_WORDS;
            total += uintBitsToFloat(candidate.y) * weight_scale(at, lane) * weight_quad(at, lane, quad);
        }
    }
    for (uint c = 0; c < 4 && column + c < columns; c++) {
        const uint to = result_at + row * columns + column + c;
        float value = total[c];
        if (part_first == 0) {
            value += info.dense == SPARSE ? info.dropped * mean[mean_at + column + c]
                                          : sums[info.dense * columns + column + c];
            result[to] = scale * value;
        } else {
            result[to] += scale * value;
        }
    }
}
