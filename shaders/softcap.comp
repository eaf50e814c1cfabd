// softcap: x = softcap * tanh(x / softcap), in place: the head's raw products to logits.
//
// x  float [count]
//
// push: count; softcap, not 0; x_at. Groups: (any); they share the work. Reference: reference.head_logits.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint count;
    float softcap;
};

layout(std430, binding = 0) buffer X { float x[]; };

#include "logits.glsl"

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += stride) {
        x[x_at + i] = squash(x[x_at + i], softcap, 1.0);
    }
}
